/* Starts the agent as the first process of new namespaces on this machine's own kernel, for the backend named `unsafe`.
 *
 *   agent --contain ROOTFS HOME ZYGOTE TMPFS_BYTES CGROUP_PROCS|-
 *
 * HOME is the guest's folder on the host; the system it sees is put together on HOME/mnt, in a mount namespace of its own, so
 * nothing of it is ever visible or left outside. stdin and stdout become the agent's. Returns once the agent runs (exit status
 * 0) or with one line on stderr that says what failed.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static const char inside_agent[] = "/usr/lib/tidemill/agent";

static int report = -1; /* to the starting process: a byte means failure, an end without one that the agent runs */

static void give_up(const char *what)
{
    dprintf(2, "%s: %s\n", what, strerror(errno));
    if (report >= 0 && write(report, "!", 1) != 1)
        _exit(76);
    _exit(75);
}

static void need(bool worked, const char *what)
{
    if (!worked)
        give_up(what);
}

static void write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    need(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text), path);
    close(fd);
}

/* The template below, memory above: a command that asked for root may change anything, and all of it goes with the guest. */
static void mount_root(const char *rootfs)
{
    char options[3 * 4096];
    need(mount("tmpfs", "mnt", "tmpfs", MS_NOSUID | MS_NODEV, "mode=700") == 0, "a folder in memory");
    need(mkdir("mnt/upper", 0755) == 0 && mkdir("mnt/work", 0755) == 0 && mkdir("mnt/root", 0755) == 0, "folders");
    snprintf(options, sizeof options, "lowerdir=%s,upperdir=mnt/upper,workdir=mnt/work", rootfs);
    need(mount("overlay", "mnt/root", "overlay", MS_NOSUID | MS_NODEV, options) == 0, "overlayfs");
}

static void bind_file(const char *from, const char *to)
{
    need(mount(from, to, NULL, MS_BIND, NULL) == 0, from);
    need(mount(NULL, to, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) == 0, from);
}

static void make_devices(void)
{
    static const struct {
        const char *name;
        unsigned major, minor;
    } devices[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};
    static const char *const links[][2] = {{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"},
                                           {"/proc/self/fd/2", "stderr"}, {"pts/ptmx", "ptmx"}};
    need(mount("tmpfs", "dev", "tmpfs", MS_NOSUID, "mode=755") == 0 && chdir("dev") == 0, "/dev");
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        need(mknod(devices[i].name, S_IFCHR, makedev(devices[i].major, devices[i].minor)) == 0
             && chmod(devices[i].name, 0666) == 0, devices[i].name);
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        need(symlink(links[i][0], links[i][1]) == 0, links[i][1]);
    need(mkdir("pts", 0755) == 0 && mkdir("shm", 0755) == 0, "/dev/pts");
    need(mount("devpts", "pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620") == 0, "/dev/pts");
    need(chdir("..") == 0, "/dev");
}

/* What in /proc reaches the whole machine is read-only or hidden. */
static void make_proc(void)
{
    static const char *const fixed[] = {"proc/sys", "proc/irq", "proc/bus", "proc/fs", "proc/sysrq-trigger"};
    static const char *const hidden[] = {"proc/kcore", "proc/kmsg", "proc/keys", "proc/timer_list", "proc/sched_debug"};
    need(mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) == 0, "/proc");
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (access(fixed[i], F_OK) == 0)
            bind_file(fixed[i], fixed[i]);
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++)
        if (access(hidden[i], F_OK) == 0)
            need(mount("dev/null", hidden[i], NULL, MS_BIND, NULL) == 0, hidden[i]);
}

static void start_loopback(void)
{
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    need(fd >= 0 && ioctl(fd, SIOCGIFFLAGS, &request) == 0, "loopback");
    request.ifr_flags |= IFF_UP | IFF_RUNNING;
    need(ioctl(fd, SIOCSIFFLAGS, &request) == 0, "loopback");
    close(fd);
}

/* The agent keeps what it needs for mounts, users, signals and limits; nothing that touches devices, modules or clocks. */
static void drop_capabilities(void)
{
    static const int kept[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP,
                               CAP_SYS_ADMIN, CAP_SYS_RESOURCE, CAP_IPC_OWNER, CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT};
    for (int c = 0; c < 64; c++) {
        bool keep = false;
        for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
            keep |= kept[i] == c;
        if (!keep && prctl(PR_CAPBSET_DROP, c, 0, 0, 0) < 0 && errno == EINVAL)
            break;
    }
}

static void become_first_process(char **argv)
{
    char own[4096];
    const char *rootfs = argv[0], *home = argv[1], *zygote = argv[2], *tmpfs_bytes = argv[3];
    need(setsid() >= 0, "setsid");
    ssize_t n = readlink("/proc/self/exe", own, sizeof own - 1);
    need(n > 0, "/proc/self/exe");
    own[n] = 0;
    need(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0, "private mounts");
    need(chdir(home) == 0, home);
    mount_root(rootfs);
    need(chdir("mnt/root") == 0, "root");
    bind_file(own, inside_agent + 1);
    bind_file(zygote, "usr/lib/tidemill/zygote.py");
    make_devices();
    make_proc();
    start_loopback();
    need(sethostname("sandbox", 7) == 0, "host name");
    need(syscall(SYS_pivot_root, ".", ".") == 0 && umount2(".", MNT_DETACH) == 0 && chdir("/") == 0, "pivot_root");
    drop_capabilities();
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    /* What runs inside keeps no way to the service but the two pipes. */
    char *arguments[] = {(char *)inside_agent, "--tmpfs-bytes", (char *)tmpfs_bytes, "--label", (char *)home, NULL};
    char *environment[] = {"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", NULL};
    int said = fcntl(2, F_DUPFD_CLOEXEC, 3);
    need(null >= 0 && said >= 0 && dup2(null, 2) == 2, "/dev/null");
    execve(inside_agent, arguments, environment);
    dup2(said, 2);
    give_up(inside_agent);
}

int contain(int argc, char **argv)
{
    if (argc != 5) {
        dprintf(2, "usage: agent --contain ROOTFS HOME ZYGOTE TMPFS_BYTES CGROUP_PROCS|-\n");
        return 64;
    }
    for (int fd = 3; fd < 1024; fd++)
        close(fd);
    umask(022);
    write_file("/proc/self/oom_score_adj", "1000");
    if (strcmp(argv[4], "-"))
        write_file(argv[4], "0");
    int done[2];
    need(pipe2(done, O_CLOEXEC) == 0, "pipe");
    need(unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET) == 0, "new namespaces");
    pid_t pid = fork();
    need(pid >= 0, "fork");
    if (pid == 0) {
        report = done[1];
        become_first_process(argv);
    }
    close(done[1]);
    char mark;
    ssize_t n;
    while ((n = read(done[0], &mark, 1)) < 0 && errno == EINTR)
        ;
    return n == 0 ? 0 : 75;
}
