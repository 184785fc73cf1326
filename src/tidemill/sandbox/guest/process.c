/* Commands: starting them as the right user with the right limits, moving their bytes, ending them by deadline, reaping. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define DRAIN_BYTES (1024 * 1024)

bool make_pipe(int ends[2], bool ours_is_read)
{
    /* The user must own them to open /dev/stdout and its like. */
    user_enter();
    int made = pipe2(ends, O_CLOEXEC);
    user_leave();
    if (made < 0)
        return false;
    int ours = ends[ours_is_read ? 0 : 1];
    fcntl(ours, F_SETFL, O_NONBLOCK);
    return true;
}

struct failure {
    const char *stage;
    int error;
};

static void limit(int what, uint64_t value)
{
    if (value) {
        struct rlimit r = {value, value};
        syscall(SYS_prlimit64, 0, what, &r, NULL);
    }
}

/* Drop every capability from the bounding set but those of the zygote, so that no later exec brings them back. */
static void bound_capabilities(bool zygote)
{
    for (int c = 0; c < 64; c++)
        if (!zygote || (c != CAP_SETUID && c != CAP_SETGID))
            if (syscall(SYS_prctl, PR_CAPBSET_DROP, c, 0, 0, 0) < 0 && errno == EINVAL)
                break;
}

static void clear_capabilities(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {{0}};
    syscall(SYS_capset, &header, none);
}

/* Runs in the child, which shares the agent's memory until it execs (vfork): only system calls and its own stack. */
static void run_child(const struct launch *l, volatile struct failure *failure)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    failure->stage = "setsid";
    syscall(SYS_setsid);
    /* Our numbers 0 to 2 and the wanted extra numbers may overlap with what is given: move everything out of the way first. */
    int moved[5] = {l->fds[0], l->fds[1], l->fds[2], l->extra_from[0], l->extra_from[1]};
    const int wanted[5] = {0, 1, 2, l->extra_to[0], l->extra_to[1]};
    failure->stage = "descriptors";
    for (int i = 0; i < 5; i++)
        if (moved[i] >= 0 && (moved[i] = fcntl(moved[i], F_DUPFD_CLOEXEC, 300)) < 0)
            goto failed;
    for (int i = 0; i < 5; i++)
        if (moved[i] >= 0 && dup2(moved[i], wanted[i]) < 0)
            goto failed;
    struct rlimit no_core = {0, 0};
    syscall(SYS_prlimit64, 0, RLIMIT_CORE, &no_core, NULL);
    syscall(SYS_prlimit64, 0, RLIMIT_MSGQUEUE, &no_core, NULL);
    limit(RLIMIT_NOFILE, l->limits.nofile);
    limit(RLIMIT_AS, l->limits.address_space);
    limit(RLIMIT_NPROC, l->limits.nproc);
    if (!l->keep_identity) {
        failure->stage = "user";
        bound_capabilities(l->zygote);
        syscall(SYS_setgroups, 0, NULL);
        if (!l->zygote) {
            if (syscall(SYS_setresgid, l->uid, l->uid, l->uid) < 0 || syscall(SYS_setresuid, l->uid, l->uid, l->uid) < 0)
                goto failed;
            clear_capabilities();
        }
        if (syscall(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
            goto failed;
    }
    failure->stage = "cwd";
    if (l->cwd && *l->cwd && chdir(l->cwd) < 0)
        goto failed;
    failure->stage = "program";
    const char *name = l->argv[0];
    if (strchr(name, '/')) {
        execve(name, l->argv, l->envp);
        goto failed;
    }
    int error = ENOENT;
    char full[4096];
    for (const char *p = l->path ? l->path : "/usr/local/bin:/usr/bin:/bin"; *name && *p;) {
        size_t n = strcspn(p, ":"), length = strlen(name);
        if (n && n + length + 2 <= sizeof full) {
            memcpy(full, p, n);
            full[n] = '/';
            memcpy(full + n + 1, name, length + 1);
            execve(full, l->argv, l->envp);
            if (errno != ENOENT && errno != ENOTDIR)
                error = errno;
        }
        p += n + (p[n] == ':');
    }
    errno = error;
failed:
    failure->error = errno ? errno : EINVAL;
    _exit(127);
}

pid_t launch(const struct launch *l, const char **stage)
{
    volatile struct failure failure = {"fork", 0};
    pid_t pid = vfork();
    if (pid == 0) {
        run_child(l, &failure);
        _exit(127);
    }
    if (pid < 0)
        failure.error = errno;
    *stage = failure.stage;
    if (failure.error) {
        if (pid > 0)
            while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
                ;
        return -failure.error;
    }
    return pid;
}

struct strings {
    char *items[MAX_ARGUMENTS + 1];
    unsigned count;
};

static bool add(struct strings *list, const struct field *f)
{
    if (list->count == MAX_ARGUMENTS || memchr(f->bytes, 0, f->length))
        return false;
    list->items[list->count] = strndup((const char *)f->bytes, f->length);
    return list->items[list->count++] != NULL;
}

static void free_strings(struct strings *list)
{
    while (list->count)
        free(list->items[--list->count]);
    free(list);
}

static const char *variable(const struct strings *env, const char *name)
{
    size_t n = strlen(name);
    for (unsigned i = 0; i < env->count; i++)
        if (!strncmp(env->items[i], name, n) && env->items[i][n] == '=')
            return env->items[i] + n + 1;
    return NULL;
}

static void start_command(struct stream *s, struct launch *l, bool with_stdin)
{
    int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1};
    const char *stage = "pipes";
    pid_t pid = -EMFILE;
    s->started_us = now_us();
    if (with_stdin ? make_pipe(in, false) : (in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        if (make_pipe(out, true) && make_pipe(err, true)) {
            l->fds[0] = in[0];
            l->fds[1] = out[1];
            l->fds[2] = err[1];
            l->extra_from[0] = l->extra_from[1] = -1;
            pid = launch(l, &stage);
        }
    close_fd(&in[0]);
    close_fd(&out[1]);
    close_fd(&err[1]);
    if (pid < 0) {
        close_fd(&in[1]);
        close_fd(&out[0]);
        close_fd(&err[0]);
        if (!strcmp(stage, "program") || !strcmp(stage, "cwd"))
            fail(s, E_INPUT, "%s %s: %s", stage, stage[0] == 'c' ? l->cwd : l->argv[0], strerror(-pid));
        else
            fail(s, pid == -EAGAIN || pid == -EMFILE || pid == -ENFILE ? E_BUSY : E_INTERNAL, "cannot start a process (%s): %s",
                 stage, strerror(-pid));
        return;
    }
    s->pid = pid;
    s->in = in[1];
    s->out = out[0];
    s->err = err[0];
    s->credit = INITIAL_CREDIT;
}

void exec_request(struct stream *s, const uint8_t *at, size_t length)
{
    struct strings *argv = calloc(1, sizeof *argv), *env = calloc(1, sizeof *env);
    struct launch l = {.uid = USER_ID};
    char cwd[4096] = "";
    uint64_t timeout_ms = 0;
    bool bad = false, with_stdin = false;
    struct field f;
    s->kind = KIND_EXEC;
    s->limit = UINT64_MAX;
    if (!argv || !env)
        _exit(70);
    for (const uint8_t *end = at + length; !bad && field_next(&at, end, &f, &bad);)
        switch (f.tag) {
        case F_ARGV: bad = !add(argv, &f); break;
        case F_ENV: bad = !add(env, &f); break;
        case F_CWD:
            bad = f.length >= sizeof cwd || memchr(f.bytes, 0, f.length);
            if (!bad)
                memcpy(cwd, f.bytes, f.length);
            break;
        case F_UID: l.uid = (uid_t)field_number(&f); break;
        case F_TIMEOUT_MS: timeout_ms = field_number(&f); break;
        case F_OUTPUT_LIMIT: s->limit = field_number(&f); break;
        case F_NPROC: l.limits.nproc = field_number(&f); break;
        case F_ADDRESS_SPACE: l.limits.address_space = field_number(&f); break;
        case F_NOFILE: l.limits.nofile = field_number(&f); break;
        case F_STDIN: with_stdin = field_number(&f) != 0; break;
        default: break;
        }
    if (bad || !argv->count || !argv->items[0][0])
        fail(s, E_INPUT, "argv is empty, or an argument or variable holds a zero byte or there are more than %d", MAX_ARGUMENTS);
    else if (l.uid != USER_ID && l.uid != 0)
        fail(s, E_INPUT, "uid %u is neither %d nor 0", l.uid, USER_ID);
    else {
        if (l.uid == 0)
            agent.root_used = true;
        l.keep_identity = agent.plain || l.uid == 0;
        l.argv = argv->items;
        l.envp = env->items;
        l.cwd = cwd;
        l.path = variable(env, "PATH");
        start_command(s, &l, with_stdin);
        if (!s->done && timeout_ms)
            s->deadline_ms = now_ms() + timeout_ms;
    }
    free_strings(argv);
    free_strings(env);
}

static void grant(struct stream *s, size_t n, bool now)
{
    s->consumed += n;
    if (s->consumed >= CREDIT_STEP || (now && s->consumed)) {
        uint8_t payload[16];
        size_t size = field_put_number(payload, F_SIZE, s->consumed);
        s->consumed = 0;
        if (!s->orphan)
            wire_send(&agent.wire, T_GRANT, 0, s->id, payload, size);
    }
}

void stream_input(struct stream *s, const uint8_t *bytes, size_t length, bool end)
{
    if (s->input_ended || s->in < 0) { /* the process closed its stdin: the rest is taken and dropped */
        grant(s, length, false);
        return;
    }
    if (length) {
        size_t left = s->input_length - s->input_start;
        if (left + length > 2 * INITIAL_CREDIT) {
            fail(s, E_INPUT, "more data than was granted");
            return;
        }
        uint8_t *grown = malloc(left + length);
        if (!grown)
            _exit(70);
        if (left)
            memcpy(grown, s->input + s->input_start, left);
        memcpy(grown + left, bytes, length);
        free(s->input);
        s->input = grown;
        s->input_start = 0;
        s->input_length = left + length;
    }
    s->input_ended = end;
}

static void write_input(struct stream *s)
{
    while (s->in >= 0 && s->input_start < s->input_length) {
        ssize_t n = write(s->in, s->input + s->input_start, s->input_length - s->input_start);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            if (errno == EAGAIN)
                return;
            close_fd(&s->in); /* EPIPE: nobody reads it any more */
            grant(s, s->input_length - s->input_start, true);
            s->input_start = s->input_length;
            return;
        }
        s->input_start += (size_t)n;
        grant(s, (size_t)n, false);
    }
    if (s->in >= 0 && s->input_ended)
        close_fd(&s->in);
}

bool forward(struct stream *s, int *fd, uint8_t type, size_t *budget)
{
    static uint8_t buffer[WIRE_PAYLOAD];
    if (*fd < 0 || !*budget)
        return false;
    bool keep = !s->orphan && s->taken < s->limit;
    size_t want = sizeof buffer < *budget ? sizeof buffer : *budget;
    if (keep) {
        if (!s->credit || !wire_room(&agent.wire) || agent.quiet)
            return false;
        if (want > s->credit)
            want = s->credit;
        if (s->limit - s->taken < want)
            want = s->limit - s->taken;
    }
    ssize_t n = read(*fd, buffer, want);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return errno == EINTR;
    if (n <= 0) {
        close_fd(fd);
        return false;
    }
    *budget -= (size_t)n;
    if (keep) {
        wire_send(&agent.wire, type, 0, s->id, buffer, (size_t)n);
        s->taken += (uint64_t)n;
        s->credit -= (uint64_t)n;
    } else
        s->truncated = true;
    return true;
}

void discard(int *fd)
{
    static uint8_t buffer[WIRE_PAYLOAD];
    ssize_t n = read(*fd, buffer, sizeof buffer);
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN))
        close_fd(fd);
}

void send_result(struct stream *s, bool killed, int exit_code, int signal)
{
    uint8_t p[128];
    size_t n = 0;
    if (!killed)
        n += field_put_number(p + n, F_EXIT_CODE, (uint64_t)exit_code);
    n += field_put_number(p + n, F_SIGNAL, (uint64_t)signal);
    n += field_put_number(p + n, F_TIMED_OUT, s->timed_out);
    n += field_put_number(p + n, F_TRUNCATED, s->truncated);
    n += field_put_number(p + n, F_DURATION_US, now_us() - s->started_us);
    if (!s->orphan)
        wire_send(&agent.wire, T_RESULT, 0, s->id, p, n);
    finish(s);
}

/* Processes that go on after their command must not be killed by a closed pipe: their output is read and dropped. */
void keep_sink(int *fd)
{
    if (*fd >= 0 && agent.num_sinks < MAX_SINKS) {
        agent.sinks[agent.num_sinks++] = *fd;
        *fd = -1;
    } else
        close_fd(fd);
}

bool stream_poll(struct stream *s, struct pollfd *fds, unsigned *n)
{
    if (s->kind != KIND_EXEC)
        return false;
    bool may_read = s->orphan || s->taken >= s->limit || (s->credit && wire_room(&agent.wire) && !agent.quiet);
    if (s->in >= 0 && (s->input_start < s->input_length || s->input_ended))
        fds[(*n)++] = (struct pollfd){.fd = s->in, .events = POLLOUT};
    if (may_read && s->out >= 0)
        fds[(*n)++] = (struct pollfd){.fd = s->out, .events = POLLIN};
    if (may_read && s->err >= 0)
        fds[(*n)++] = (struct pollfd){.fd = s->err, .events = POLLIN};
    return s->exited && may_read; /* an ended command is finished without waiting */
}

void stream_pump(struct stream *s)
{
    if (s->kind == KIND_GET)
        get_pump(s);
    if (s->kind != KIND_EXEC || s->done)
        return;
    size_t once = WIRE_PAYLOAD;
    write_input(s);
    if (!s->exited) {
        forward(s, &s->out, T_STDOUT, &once);
        once = WIRE_PAYLOAD;
        forward(s, &s->err, T_STDERR, &once);
        return;
    }
    bool more = forward(s, &s->out, T_STDOUT, &s->drain[0]);
    more |= forward(s, &s->err, T_STDERR, &s->drain[1]);
    bool blocked = !s->orphan && s->taken < s->limit && (!s->credit || !wire_room(&agent.wire) || agent.quiet);
    if (more || (blocked && (s->out >= 0 || s->err >= 0)))
        return;
    keep_sink(&s->out);
    keep_sink(&s->err);
    bool killed = WIFSIGNALED(s->wait_status);
    send_result(s, killed, killed ? 0 : WEXITSTATUS(s->wait_status), killed ? WTERMSIG(s->wait_status) : 0);
}

void stream_kill(struct stream *s)
{
    if (s->kind == KIND_EXEC && s->pid > 0 && !s->exited) {
        kill(-s->pid, SIGKILL);
        kill(s->pid, SIGKILL);
    }
}

void reap(void)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == agent.zygote) {
            zygote_lost();
            continue;
        }
        for (struct stream *s = agent.streams; s; s = s->next)
            if (s->kind == KIND_EXEC && s->pid == pid && !s->exited) {
                s->exited = true;
                s->wait_status = status;
                s->drain[0] = s->drain[1] = DRAIN_BYTES;
                s->deadline_ms = 0;
            }
        for (struct session *x = agent.sessions; x; x = x->next)
            if (!x->python && x->pid == pid)
                session_exited(x, status);
    }
}
