/* Back to the template's state from inside: no process but the agent and the zygote, nothing in any place the user can write.
 *
 * The user owns nothing outside the folders below, so fresh ones are all there is to restore on disk. If a command ran as
 * root, or something of the user's survives, the answer says so and the host replaces the whole sandbox.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct {
    const char *path;
    mode_t mode;
    uid_t owner;
} places[] = {
    {"/home/user", 0755, USER_ID}, {"/tmp", 01777, 0}, {"/var/tmp", 01777, 0}, {"/dev/shm", 01777, 0},
};

/* Returns false, errno set, if a place cannot be made fresh. */
bool fresh_mounts(bool replace)
{
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char options[96];
        snprintf(options, sizeof options, "mode=%o,uid=%u,gid=%u,size=%llu", places[i].mode, places[i].owner, places[i].owner,
                 (unsigned long long)agent.tmpfs_bytes);
        if (replace && umount2(places[i].path, MNT_DETACH) < 0)
            return false;
        if (!replace)
            mkdir(places[i].path, 0755);
        if (mount("tmpfs", places[i].path, "tmpfs", MS_NOSUID | MS_NODEV, options) < 0)
            return false;
        /* Not every kernel takes the owner and mode from the options. */
        if (chown(places[i].path, places[i].owner, places[i].owner) < 0 || chmod(places[i].path, places[i].mode) < 0)
            return false;
    }
    return true;
}

/* Processes but the agent and the zygote; those that have ended and only wait to be reaped are not counted. */
static int others(void)
{
    DIR *proc = opendir("/proc");
    int count = 0;
    if (!proc)
        return -1;
    for (struct dirent *d; (d = readdir(proc));) {
        if (!isdigit((unsigned char)d->d_name[0]))
            continue;
        pid_t pid = (pid_t)atoi(d->d_name);
        if (pid == getpid() || pid == agent.zygote)
            continue;
        char name[64], line[512];
        snprintf(name, sizeof name, "/proc/%d/stat", pid);
        int fd = open(name, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
        close_fd(&fd);
        if (n <= 0)
            continue;
        line[n] = 0;
        char *state = strrchr(line, ')');
        if (state && state[1] == ' ' && (state[2] == 'Z' || state[2] == 'X'))
            continue;
        count++;
    }
    closedir(proc);
    return count;
}

int count_processes(void)
{
    return others();
}

/* System V objects outlive their makers. */
static void remove_ipc(void)
{
    struct shm_info shm;
    struct shmid_ds segment;
    int last = shmctl(0, SHM_INFO, (struct shmid_ds *)(void *)&shm);
    for (int i = 0, id; i <= last; i++)
        if ((id = shmctl(i, SHM_STAT, &segment)) >= 0)
            shmctl(id, IPC_RMID, NULL);
    union {
        int value;
        struct semid_ds *set;
        struct seminfo *info;
    } argument;
    struct seminfo info;
    struct semid_ds set;
    argument.info = &info;
    last = semctl(0, 0, SEM_INFO, argument);
    argument.set = &set;
    for (int i = 0, id; i <= last; i++)
        if ((id = semctl(i, 0, SEM_STAT, argument)) >= 0)
            semctl(id, 0, IPC_RMID);
    struct msginfo messages;
    struct msqid_ds queue;
    last = msgctl(0, MSG_INFO, (struct msqid_ds *)(void *)&messages);
    for (int i = 0, id; i <= last; i++)
        if ((id = msgctl(i, MSG_STAT, &queue)) >= 0)
            msgctl(id, IPC_RMID, NULL);
}

/* With the real id root's and the effective one the user's, the signal reaches what belongs to either but not the zygote; the
 * kernel sends it to all at once, so nothing forks its way out for long. */
static void kill_others(void)
{
    user_enter();
    kill(-1, SIGKILL);
    user_leave();
}

static bool end_processes(int *before)
{
    *before = others();
    for (int round = 0; round < 2000; round++) {
        kill_others();
        reap();
        int left = others();
        if (left == 0)
            return true;
        usleep(round < 50 ? 200 : 2000);
    }
    return false;
}

void reset_request(struct stream *request)
{
    char detail[160] = "";
    uint8_t p[256];
    int before = 0;
    if (agent.plain) {
        fail(request, E_INPUT, "not in a sandbox");
        return;
    }
    for (struct stream *s = agent.streams; s; s = s->next)
        if (s != request) {
            if (!s->done)
                fail(s, E_GONE, "the sandbox was reset");
            s->session = NULL;
        }
    for (struct session *x = agent.sessions; x; x = x->next) {
        x->ended = x->wait_known = true;
        x->opening = false;
        x->run = x->open_stream = NULL;
    }
    bool quiet = end_processes(&before);
    sessions_sweep();
    while (agent.num_sinks)
        close_fd(&agent.sinks[--agent.num_sinks]);
    if (!quiet)
        snprintf(detail, sizeof detail, "%d processes could not be ended", others());
    else if (agent.root_used)
        snprintf(detail, sizeof detail, "a command ran as root");
    else if (!fresh_mounts(true))
        snprintf(detail, sizeof detail, "fresh folders: %s", strerror(errno));
    else {
        remove_ipc();
        if (agent.zygote <= 0 && !zygote_start())
            snprintf(detail, sizeof detail, "the interpreter cannot be started again");
    }
    size_t n = field_put_number(p, F_PROCESSES, before < 0 ? 0 : (uint64_t)before);
    n += field_put_number(p + n, F_NEEDS_FULL, detail[0] != 0);
    n += field_put(p + n, F_DETAIL, detail, (uint32_t)strlen(detail));
    wire_send(&agent.wire, T_RESULT, 0, request->id, p, n);
    finish(request);
}
