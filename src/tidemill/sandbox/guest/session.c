/* Live sessions: a bash that evaluates what it is told, and Python interpreters forked from the zygote.
 *
 * Code goes in on a pipe of its own and the exit status comes back on another, so no delimiter in the output can be mistaken
 * for the end of a cell. What arrives on stdout and stderr before the status belongs to the cell; what background processes
 * write between cells is dropped.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SHELL_SCRIPT_FD 198
#define SHELL_STATUS_FD 199
#define MAX_ENVIRONMENT 256

/* What the zygote is told with four descriptors, and what it tells. */
struct zygote_request {
    uint32_t session, zero;
    uint64_t nproc, address_space, nofile;
};
struct zygote_notice {
    uint32_t type; /* 1: the session runs; 2: the process `pid` has ended */
    uint32_t session;
    int32_t pid, status;
};

static void free_session(struct session *x)
{
    close_fd(&x->command);
    close_fd(&x->out);
    close_fd(&x->err);
    close_fd(&x->status);
    free(x->code);
    free(x);
    agent.num_sessions--;
}

void sessions_sweep(void)
{
    for (struct session **at = &agent.sessions; *at;) {
        struct session *x = *at;
        if (x->ended && !x->run && !x->opening) {
            *at = x->next;
            keep_sink(&x->out);
            keep_sink(&x->err);
            free_session(x);
        } else
            at = &x->next;
    }
}

static void answer_open(struct session *x)
{
    uint8_t p[32];
    size_t n = field_put_number(p, F_SESSION, x->id);
    n += field_put_number(p + n, F_PID, (uint64_t)x->pid);
    struct stream *s = x->open_stream;
    x->open_stream = NULL;
    x->opening = false;
    if (s) {
        wire_send(&agent.wire, T_RESULT, 0, s->id, p, n);
        s->session = NULL;
        finish(s);
    } else
        session_kill(x); /* the one who asked is gone */
}

static void refuse_open(struct session *x, const char *why)
{
    if (x->open_stream) {
        fail(x->open_stream, E_INTERNAL, "%s", why);
        x->open_stream->session = NULL;
    }
    x->open_stream = NULL;
    x->opening = false;
    x->ended = true;
}

static bool ask_zygote(struct session *x, const struct limits *limits, const int fds[4])
{
    struct zygote_request request = {x->id, 0, limits->nproc, limits->address_space, limits->nofile};
    struct iovec part = {&request, sizeof request};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(4 * sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(4 * sizeof(int));
    memcpy(CMSG_DATA(c), fds, 4 * sizeof(int));
    return sendmsg(agent.zygote_socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof request;
}

static const char *start_shell(struct session *x, const struct limits *limits, char *const *env, const int fds[4])
{
    char script[32];
    snprintf(script, sizeof script, "/dev/fd/%d", SHELL_SCRIPT_FD);
    char *argv[] = {(char *)agent.shell, "--noprofile", "--norc", script, NULL};
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    struct launch l = {.argv = argv, .envp = env, .cwd = agent.plain ? "" : "/home/user", .uid = USER_ID,
                       .keep_identity = agent.plain, .fds = {null, fds[1], fds[2]}, .extra_from = {fds[0], fds[3]},
                       .extra_to = {SHELL_SCRIPT_FD, SHELL_STATUS_FD}, .limits = *limits};
    const char *stage = "";
    pid_t pid = launch(&l, &stage);
    close_fd(&null);
    if (pid < 0)
        return strerror(-pid);
    x->pid = pid;
    /* Errors are to name the shell, not the pipe it reads. */
    x->code = (uint8_t *)strdup("BASH_ARGV0=bash\n");
    x->code_length = x->code ? strlen((char *)x->code) : 0;
    return NULL;
}

void session_open(struct stream *s, const uint8_t *at, size_t length)
{
    char kind[8] = "", *env[MAX_ENVIRONMENT + 1] = {NULL};
    unsigned num_env = 0;
    struct limits limits = {0};
    struct field f;
    bool bad = false;
    s->kind = KIND_OPEN;
    for (const uint8_t *end = at + length; !bad && field_next(&at, end, &f, &bad);)
        switch (f.tag) {
        case F_KIND:
            bad = f.length >= sizeof kind;
            if (!bad)
                memcpy(kind, f.bytes, f.length);
            break;
        case F_ENV:
            bad = num_env == MAX_ENVIRONMENT || memchr(f.bytes, 0, f.length) || !(env[num_env] = strndup((const char *)f.bytes, f.length));
            num_env += !bad;
            break;
        case F_NPROC: limits.nproc = field_number(&f); break;
        case F_ADDRESS_SPACE: limits.address_space = field_number(&f); break;
        case F_NOFILE: limits.nofile = field_number(&f); break;
        default: break;
        }
    bool python = !strcmp(kind, "python");
    int command[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, status[2] = {-1, -1};
    struct session *x = NULL;
    if (bad || (!python && strcmp(kind, "sh"))) {
        fail(s, E_INPUT, "kind of session is neither sh nor python, or its environment is malformed");
        goto out;
    }
    if (agent.num_sessions >= MAX_SESSIONS) {
        fail(s, E_BUSY, "%d sessions are open", MAX_SESSIONS);
        goto out;
    }
    if (python && agent.zygote <= 0 && !zygote_start()) {
        fail(s, E_INTERNAL, "the interpreter cannot be started");
        goto out;
    }
    if (!make_pipe(command, false) || !make_pipe(out, true) || !make_pipe(err, true) || !make_pipe(status, true)) {
        fail(s, E_BUSY, "pipes: %s", strerror(errno));
        goto out;
    }
    if (!(x = calloc(1, sizeof *x)))
        _exit(70);
    agent.num_sessions++;
    x->id = ++agent.next_session;
    x->python = python;
    x->opening = true;
    x->open_stream = s;
    x->command = command[1];
    x->out = out[0];
    x->err = err[0];
    x->status = status[0];
    s->session = x;
    command[1] = out[0] = err[0] = status[0] = -1;
    x->next = agent.sessions;
    agent.sessions = x;
    const int theirs[4] = {command[0], out[1], err[1], status[1]};
    if (python) {
        if (!ask_zygote(x, &limits, theirs))
            refuse_open(x, "the zygote does not answer");
    } else {
        const char *why = start_shell(x, &limits, env, theirs);
        if (why)
            refuse_open(x, why);
        else
            answer_open(x);
    }
out:
    for (int i = 0; i < 2; i++) {
        close_fd(&command[i]);
        close_fd(&out[i]);
        close_fd(&err[i]);
        close_fd(&status[i]);
    }
    while (num_env)
        free(env[--num_env]);
}

/* `eval 'code'` with the status pipe hidden from it, then the status: a quoted string cannot be left, whatever is in it. */
static uint8_t *shell_cell(const struct session *x, const uint8_t *code, size_t length, size_t *size)
{
    uint8_t *text = malloc(4 * length + 160);
    if (!text)
        _exit(70);
    size_t n = 0;
    if (x->reseed) {
        uint16_t seed = 0;
        if (getrandom(&seed, sizeof seed, 0) == sizeof seed)
            n += (size_t)sprintf((char *)text, "RANDOM=%u; ", seed);
    }
    n += (size_t)sprintf((char *)text + n, "eval '");
    for (size_t i = 0; i < length; i++)
        if (code[i] == '\'') {
            memcpy(text + n, "'\\''", 4);
            n += 4;
        } else
            text[n++] = code[i];
    n += (size_t)sprintf((char *)text + n, "' %d>&-; printf '%%d\\n' \"$?\" >&%d\n", SHELL_STATUS_FD, SHELL_STATUS_FD);
    *size = n;
    return text;
}

static uint8_t *python_cell(const struct session *x, const uint8_t *code, size_t length, size_t *size)
{
    uint8_t *text = malloc(length + 5);
    uint32_t n = (uint32_t)length;
    if (!text)
        _exit(70);
    memcpy(text, &n, 4);
    text[4] = x->reseed;
    if (length)
        memcpy(text + 5, code, length);
    *size = length + 5;
    return text;
}

void session_run(struct stream *s, const uint8_t *at, size_t length)
{
    const uint8_t *code = (const uint8_t *)"";
    size_t code_length = 0;
    uint64_t timeout_ms = 0, id = 0;
    struct field f;
    bool bad = false;
    s->kind = KIND_RUN;
    s->limit = UINT64_MAX;
    s->credit = INITIAL_CREDIT;
    for (const uint8_t *end = at + length; !bad && field_next(&at, end, &f, &bad);)
        switch (f.tag) {
        case F_SESSION: id = field_number(&f); break;
        case F_CODE:
            code = f.bytes;
            code_length = f.length;
            break;
        case F_TIMEOUT_MS: timeout_ms = field_number(&f); break;
        case F_OUTPUT_LIMIT: s->limit = field_number(&f); break;
        default: break;
        }
    struct session *x = find_session((uint32_t)id);
    if (bad)
        fail(s, E_INPUT, "malformed request");
    else if (!x || x->ended || x->opening)
        fail(s, E_GONE, "the session has ended");
    else if (x->run)
        fail(s, E_BUSY, "the session is running a cell");
    else if (memchr(code, 0, code_length))
        fail(s, E_INPUT, "code holds a zero byte");
    else {
        /* Left over from background processes of earlier cells. */
        for (int i = 0; i < 16 && x->out >= 0; i++)
            discard(&x->out);
        for (int i = 0; i < 16 && x->err >= 0; i++)
            discard(&x->err);
        size_t size;
        uint8_t *text = x->python ? python_cell(x, code, code_length, &size) : shell_cell(x, code, code_length, &size);
        size_t left = x->code_length - x->code_start;
        if (left) { /* the shell's first line may not have been taken yet */
            uint8_t *both = malloc(left + size);
            if (!both)
                _exit(70);
            memcpy(both, x->code + x->code_start, left);
            memcpy(both + left, text, size);
            free(text);
            text = both;
            size += left;
        }
        free(x->code);
        x->code = text;
        x->code_length = size;
        x->code_start = x->answered = 0;
        x->reseed = false;
        x->run = s;
        s->session = x;
        s->started_us = now_us();
        if (timeout_ms)
            s->deadline_ms = now_ms() + timeout_ms;
        session_pump(x);
    }
}

void session_close(struct stream *s, const uint8_t *at, size_t length)
{
    struct field f;
    bool bad = false;
    uint64_t id = 0;
    for (const uint8_t *end = at + length; !bad && field_next(&at, end, &f, &bad);)
        if (f.tag == F_SESSION)
            id = field_number(&f);
    struct session *x = find_session((uint32_t)id);
    if (x)
        session_kill(x);
    wire_send(&agent.wire, T_RESULT, 0, s->id, NULL, 0);
    finish(s);
}

void session_kill(struct session *x)
{
    if (!x->wait_known && x->pid > 0) {
        kill(-x->pid, SIGKILL);
        kill(x->pid, SIGKILL);
    }
    x->ended = true;
    if (x->run && !x->wait_known) {
        x->wait_status = SIGKILL;
        x->wait_known = true;
    }
}

void session_exited(struct session *x, int wait_status)
{
    if (!x->wait_known)
        x->wait_status = wait_status;
    x->wait_known = true;
    x->ended = true;
}

void session_poll(struct session *x, struct pollfd *fds, unsigned *n)
{
    struct stream *s = x->run;
    bool may_read = !s || s->orphan || s->taken >= s->limit || (s->credit && wire_room(&agent.wire) && !agent.quiet);
    if (x->command >= 0 && x->code_start < x->code_length)
        fds[(*n)++] = (struct pollfd){.fd = x->command, .events = POLLOUT};
    if (may_read && x->out >= 0)
        fds[(*n)++] = (struct pollfd){.fd = x->out, .events = POLLIN};
    if (may_read && x->err >= 0)
        fds[(*n)++] = (struct pollfd){.fd = x->err, .events = POLLIN};
    if (x->status >= 0 && !x->opening)
        fds[(*n)++] = (struct pollfd){.fd = x->status, .events = POLLIN};
}

static void write_code(struct session *x)
{
    while (x->command >= 0 && x->code_start < x->code_length) {
        ssize_t n = write(x->command, x->code + x->code_start, x->code_length - x->code_start);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            if (errno != EAGAIN)
                close_fd(&x->command);
            return;
        }
        x->code_start += (size_t)n;
    }
}

/* The status of a cell: four bytes from Python, a line with a number from the shell. */
static void read_status(struct session *x)
{
    struct stream *s = x->run;
    while (x->status >= 0) {
        ssize_t n = read(x->status, x->answer + x->answered, x->python ? 4 - x->answered : 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            close_fd(&x->status);
            if (!x->python || x->wait_known)
                return;
            /* It has ended, and the zygote's notice with its status follows; or it closed what it must not, and is of no use. */
            x->ended = true;
            if (x->pid > 0)
                kill(x->pid, SIGKILL);
            return;
        }
        x->answered += (size_t)n;
        bool whole = x->python ? x->answered == 4 : x->answer[x->answered - 1] == '\n' || x->answered == sizeof x->answer;
        if (!whole)
            continue;
        int code = 0;
        if (x->python)
            memcpy(&code, x->answer, 4);
        else
            for (size_t i = 0; i < x->answered && x->answer[i] >= '0' && x->answer[i] <= '9'; i++)
                code = code * 10 + (x->answer[i] - '0');
        x->answered = 0;
        if (s && !s->cell_ended && x->code_start == x->code_length) {
            s->cell_ended = true;
            s->exit_code = code;
            s->drain[0] = s->drain[1] = 1024 * 1024;
            s->deadline_ms = 0;
        }
    }
}

void session_pump(struct session *x)
{
    write_code(x);
    if (!x->opening)
        read_status(x);
    struct stream *s = x->run;
    if (!s) {
        if (x->out >= 0)
            discard(&x->out);
        if (x->err >= 0)
            discard(&x->err);
        return;
    }
    size_t once = WIRE_PAYLOAD, again = WIRE_PAYLOAD;
    bool over = s->cell_ended || x->wait_known;
    if (!over) {
        forward(s, &x->out, T_STDOUT, &once);
        forward(s, &x->err, T_STDERR, &again);
        return;
    }
    if (!s->cell_ended && !s->exited) {
        s->exited = true;
        s->drain[0] = s->drain[1] = 1024 * 1024;
    }
    bool more = forward(s, &x->out, T_STDOUT, &s->drain[0]);
    more |= forward(s, &x->err, T_STDERR, &s->drain[1]);
    bool blocked = !s->orphan && s->taken < s->limit && (!s->credit || !wire_room(&agent.wire) || agent.quiet);
    if (more || blocked)
        return;
    x->run = NULL;
    s->session = NULL;
    if (s->cell_ended)
        send_result(s, false, s->exit_code, 0);
    else {
        bool killed = WIFSIGNALED(x->wait_status);
        send_result(s, killed, killed ? 0 : WEXITSTATUS(x->wait_status), killed ? WTERMSIG(x->wait_status) : 0);
    }
}

bool zygote_start(void)
{
    int pair[2];
    if (!agent.zygote_script || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return false;
    char *argv[] = {(char *)agent.python, "-I", "-X", "utf8", (char *)agent.zygote_script, NULL};
    char *env[] = {"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/home/user", "USER=user", "LOGNAME=user", "SHELL=/bin/bash",
                   "LANG=C.UTF-8", "TERM=dumb", agent.plain ? "TIDEMILL_ZYGOTE_PLAIN=1" : NULL, NULL};
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    struct launch l = {.argv = argv, .envp = env, .cwd = "/", .keep_identity = agent.plain, .zygote = true,
                       .fds = {null, null, null}, .extra_from = {pair[1], -1}, .extra_to = {3, -1}};
    const char *stage;
    pid_t pid = launch(&l, &stage);
    close_fd(&null);
    close_fd(&pair[1]);
    struct zygote_notice ready;
    if (pid > 0) {
        agent.zygote = pid;
        agent.zygote_socket = pair[0];
        /* Its own start, before any user code exists that could delay it. */
        if (recv(pair[0], &ready, sizeof ready, 0) == (ssize_t)sizeof ready) {
            fcntl(pair[0], F_SETFL, O_NONBLOCK);
            return true;
        }
        kill(pid, SIGKILL);
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            ;
        agent.zygote = 0;
    }
    close_fd(&pair[0]);
    agent.zygote_socket = -1;
    return false;
}

void zygote_read(void)
{
    struct zygote_notice notice;
    ssize_t n;
    while ((n = recv(agent.zygote_socket, &notice, sizeof notice, 0)) == (ssize_t)sizeof notice)
        for (struct session *x = agent.sessions; x; x = x->next) {
            if (!x->python)
                continue;
            if (notice.type == 1 && x->id == notice.session && x->opening) {
                x->pid = notice.pid;
                if (notice.pid > 0)
                    answer_open(x);
                else
                    refuse_open(x, "the interpreter could not fork: too many processes?");
            } else if (notice.type == 2 && x->pid == notice.pid && !x->opening)
                session_exited(x, notice.status);
        }
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
        zygote_lost();
}

/* Its sessions run on, but nobody will tell how they end; the next opening starts a new one. */
void zygote_lost(void)
{
    if (agent.zygote > 0)
        kill(agent.zygote, SIGKILL);
    agent.zygote = 0;
    close_fd(&agent.zygote_socket);
    for (struct session *x = agent.sessions; x; x = x->next) {
        if (x->opening && x->python)
            refuse_open(x, "the zygote has ended");
        if (x->python && x->ended && !x->wait_known)
            session_exited(x, SIGKILL);
    }
}
