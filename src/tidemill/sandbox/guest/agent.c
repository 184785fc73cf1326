/* The first process of a sandbox: does what the host asks on stdin, answers on stdout, and reaps orphans.
 *
 * It is root inside; what it starts for the user is uid 1000 without capabilities. It knows no service and no backend: a host
 * that dies is replaced by another that says HELLO with the last sequence number it saw; a HELLO with another identity tells
 * the agent that it is a restored copy. Protocol: wire.h and protocol.py.
 *
 *   agent [--label TEXT] [--tmpfs-bytes N] [--plain] [--zygote SCRIPT] [--python PROGRAM] [--shell PROGRAM]
 */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct agent agent = {
    .zygote_script = "/usr/lib/tidemill/zygote.py", .python = "/usr/bin/python3", .shell = "/bin/bash",
    .tmpfs_bytes = 1024ull * 1024 * 1024, .zygote_socket = -1,
};

uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

uint64_t now_ms(void)
{
    return now_us() / 1000;
}

void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

struct stream *find_stream(uint32_t id)
{
    for (struct stream *s = agent.streams; s; s = s->next)
        if (s->id == id && !s->done && !s->orphan)
            return s;
    return NULL;
}

struct session *find_session(uint32_t id)
{
    for (struct session *x = agent.sessions; x; x = x->next)
        if (x->id == id)
            return x;
    return NULL;
}

/* The stream is freed at the end of the turn; nothing more is sent on it. */
void finish(struct stream *s)
{
    s->done = true;
}

void fail(struct stream *s, int kind, const char *format, ...)
{
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(message + 1, sizeof message - 1, format, arguments);
    va_end(arguments);
    message[0] = (char)kind;
    if (n > (int)sizeof message - 2)
        n = (int)sizeof message - 2;
    if (!s->orphan && !s->done)
        wire_send(&agent.wire, T_ERROR, 0, s->id, message, (size_t)n + 1);
    finish(s);
}

static void free_stream(struct stream *s)
{
    stream_kill(s);
    close_fd(&s->in);
    close_fd(&s->out);
    close_fd(&s->err);
    file_abandon(s);
    if (s->session) {
        if (s->session->run == s) { /* a cell that was cancelled takes its session along */
            s->session->run = NULL;
            session_kill(s->session);
        }
        if (s->session->open_stream == s)
            s->session->open_stream = NULL;
    }
    free(s->input);
    free(s->request);
    free(s);
    agent.num_streams--;
}

static void sweep(void)
{
    for (struct stream **at = &agent.streams; *at;) {
        struct stream *s = *at;
        if (s->done) {
            *at = s->next;
            free_stream(s);
        } else
            at = &s->next;
    }
    sessions_sweep();
}

static struct stream *new_stream(uint32_t id)
{
    struct stream *s = calloc(1, sizeof *s);
    if (!s)
        _exit(70);
    s->id = id;
    s->kind = KIND_REQUEST;
    s->in = s->out = s->err = s->file = -1;
    s->next = agent.streams;
    agent.streams = s;
    agent.num_streams++;
    return s;
}

static void new_boot_id(void)
{
    uint8_t bytes[16];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        _exit(72);
    for (int i = 0; i < 16; i++)
        snprintf(agent.boot_id + 2 * i, 3, "%02x", bytes[i]);
}

static void shift_deadlines(uint64_t ms)
{
    for (struct stream *s = agent.streams; s; s = s->next)
        if (s->deadline_ms)
            s->deadline_ms += ms;
}

static void send_sessions(uint8_t type, uint32_t stream)
{
    static uint8_t p[256 + 64 * MAX_SESSIONS];
    size_t n = field_put_number(p, F_VERSION, PROTOCOL_VERSION);
    n += field_put(p + n, F_BOOT_ID, agent.boot_id, 32);
    n += field_put_number(p + n, F_GENERATION, agent.generation);
    n += field_put_number(p + n, F_STREAMS, agent.num_streams);
    n += field_put_number(p + n, F_FIRST_SEQ, agent.wire.head ? agent.wire.head->seq : agent.wire.next_seq);
    for (struct session *x = agent.sessions; x; x = x->next)
        if (!x->ended && !x->opening) {
            uint8_t one[64];
            size_t m = field_put_number(one, F_SESSION, x->id);
            m += field_put(one + m, F_KIND, x->python ? "python" : "sh", x->python ? 6 : 2);
            m += field_put_number(one + m, F_BUSY, x->run != NULL);
            n += field_put(p + n, F_SESSIONS, one, (uint32_t)m);
        }
    wire_send(&agent.wire, type, 0, stream, p, n);
}

/* A new host, or the first: see the head of this file. */
static void hello(const struct frame *frame)
{
    const uint8_t *at = frame->payload, *end = at + frame->length;
    uint8_t identity[16] = {0};
    uint64_t last_seen = 0, generation = 0;
    bool abandon = false, bad = false;
    struct field f;
    while (field_next(&at, end, &f, &bad))
        switch (f.tag) {
        case F_IDENTITY:
            if (f.length == sizeof identity)
                memcpy(identity, f.bytes, sizeof identity);
            break;
        case F_LAST_SEEN: last_seen = field_number(&f); break;
        case F_GENERATION: generation = field_number(&f); break;
        case F_ABANDON: abandon = field_number(&f) != 0; break;
        default: break;
        }
    if (bad)
        return;
    agent.wire.seen = frame->seq;
    bool copy = !agent.greeted || memcmp(identity, agent.identity, sizeof identity) != 0;
    if (agent.quiet)
        shift_deadlines(now_ms() - agent.quiet_since_ms);
    agent.quiet = false;
    if (copy) {
        /* Its streams belong to the one it was copied from. Processes run on; nobody hears of them. */
        wire_drop(&agent.wire);
        for (struct stream *s = agent.streams; s; s = s->next) {
            s->orphan = true;
            if (s->kind != KIND_EXEC && s->kind != KIND_RUN)
                finish(s);
        }
        for (struct session *x = agent.sessions; x; x = x->next)
            x->reseed = true;
        if (agent.greeted)
            new_boot_id();
    } else {
        if (abandon) {
            for (struct stream *s = agent.streams; s; s = s->next)
                if (s->kind == KIND_RUN)
                    s->orphan = true;
                else
                    finish(s);
        }
        wire_replay(&agent.wire, last_seen);
    }
    agent.greeted = true;
    memcpy(agent.identity, identity, sizeof identity);
    agent.generation = generation;
    send_sessions(T_WELCOME, frame->stream);
}

static void dispatch(struct stream *s)
{
    const uint8_t *at = s->request;
    size_t n = s->request_length;
    switch (s->type) {
    case T_EXEC: exec_request(s, at, n); break;
    case T_SESSION_OPEN: session_open(s, at, n); break;
    case T_SESSION_RUN: session_run(s, at, n); break;
    case T_SESSION_CLOSE: session_close(s, at, n); break;
    case T_SESSION_LIST:
    case T_STAT:
        send_sessions(T_RESULT, s->id);
        finish(s);
        break;
    case T_PUT: put_request(s, at, n); break;
    case T_GET: get_request(s, at, n); break;
    case T_RESET: reset_request(s); break;
    default: fail(s, E_INPUT, "unknown request %d", s->type); break;
    }
    free(s->request);
    s->request = NULL;
    s->request_length = 0;
}

/* Requests come in one or more frames; the last lacks MORE. */
static void receive(const struct frame *frame)
{
    struct stream *s = find_stream(frame->stream);
    if (s && (s->kind != KIND_REQUEST || s->type != frame->type))
        return; /* the id is in use: a host that errs harms only itself */
    if (!s) {
        s = new_stream(frame->stream);
        s->type = frame->type;
        if (agent.num_streams > MAX_STREAMS) {
            fail(s, E_BUSY, "%d requests are open", MAX_STREAMS);
            return;
        }
    }
    if (s->request_length + frame->length > MAX_REQUEST) {
        fail(s, E_INPUT, "the request is larger than %d bytes", MAX_REQUEST);
        return;
    }
    uint8_t *grown = realloc(s->request, s->request_length + frame->length + 1);
    if (!grown)
        _exit(70);
    memcpy(grown + s->request_length, frame->payload, frame->length);
    s->request = grown;
    s->request_length += frame->length;
    if (!(frame->flags & FLAG_MORE))
        dispatch(s);
}

static uint64_t only_number(const struct frame *frame, uint8_t tag)
{
    const uint8_t *at = frame->payload, *end = at + frame->length;
    struct field f;
    bool bad = false;
    while (field_next(&at, end, &f, &bad))
        if (f.tag == tag)
            return field_number(&f);
    return 0;
}

static void handle(void *context, const struct frame *frame)
{
    (void)context;
    if (frame->type == T_HELLO) {
        hello(frame);
        return;
    }
    if (!agent.greeted || frame->seq <= agent.wire.seen)
        return;
    agent.wire.seen = frame->seq;
    wire_acknowledge(&agent.wire, frame->ack);
    struct stream *s = find_stream(frame->stream);
    switch (frame->type) {
    case T_ACK:
        break;
    case T_DATA:
        if (s && s->kind == KIND_EXEC)
            stream_input(s, frame->payload, frame->length, frame->flags & FLAG_END);
        else if (s && s->kind == KIND_PUT)
            put_data(s, frame->payload, frame->length, frame->flags & FLAG_END);
        break;
    case T_CREDIT:
        if (s)
            s->credit += only_number(frame, F_SIZE);
        break;
    case T_CANCEL:
        if (s)
            finish(s);
        break;
    case T_QUIESCE:
        agent.quiet = true;
        agent.quiet_since_ms = now_ms();
        wire_send(&agent.wire, T_QUIET, 0, frame->stream, NULL, 0);
        agent.wire.gate = agent.wire.tail;
        break;
    case T_CONTINUE:
        if (agent.quiet)
            shift_deadlines(now_ms() - agent.quiet_since_ms);
        agent.quiet = false;
        agent.wire.gate = NULL;
        break;
    case T_SHIFT:
        shift_deadlines(only_number(frame, F_TIMEOUT_MS));
        break;
    default:
        receive(frame);
        break;
    }
}

static void check_deadlines(void)
{
    uint64_t now = now_ms();
    for (struct stream *s = agent.streams; s; s = s->next)
        if (s->deadline_ms && now >= s->deadline_ms && !agent.quiet) {
            s->deadline_ms = 0;
            s->timed_out = true;
            if (s->kind == KIND_RUN && s->session)
                session_kill(s->session);
            else
                stream_kill(s);
        }
}

static int next_wait_ms(void)
{
    uint64_t now = now_ms(), wait = 60000;
    for (struct stream *s = agent.streams; s; s = s->next)
        if (s->deadline_ms && !agent.quiet)
            wait = s->deadline_ms <= now ? 0 : s->deadline_ms - now < wait ? s->deadline_ms - now : wait;
    return (int)wait;
}

static void child_ended(int signal)
{
    (void)signal;
}

/* One turn: wait for anything, then give every stream and session one step. */
static void turn(const sigset_t *while_waiting)
{
    static struct pollfd fds[3 + 4 * MAX_STREAMS + 4 * MAX_SESSIONS + MAX_SINKS];
    unsigned n = 0;
    bool at_once = false;
    fds[n++] = (struct pollfd){.fd = agent.wire.in, .events = POLLIN};
    if (wire_pending(&agent.wire))
        fds[n++] = (struct pollfd){.fd = agent.wire.out, .events = POLLOUT};
    if (agent.zygote_socket >= 0)
        fds[n++] = (struct pollfd){.fd = agent.zygote_socket, .events = POLLIN};
    for (struct stream *s = agent.streams; s; s = s->next) {
        at_once |= stream_poll(s, fds, &n);
        at_once |= s->kind == KIND_GET && s->credit && wire_room(&agent.wire) && !agent.quiet;
    }
    for (struct session *x = agent.sessions; x; x = x->next) {
        session_poll(x, fds, &n);
        at_once |= x->run && (x->run->cell_ended || x->wait_known) && x->run->credit && wire_room(&agent.wire) && !agent.quiet;
    }
    unsigned first_sink = n;
    for (unsigned i = 0; i < agent.num_sinks; i++)
        fds[n++] = (struct pollfd){.fd = agent.sinks[i], .events = POLLIN};
    int ms = at_once ? 0 : next_wait_ms();
    struct timespec wait = {ms / 1000, ms % 1000 * 1000000L};
    int ready = ppoll(fds, n, &wait, while_waiting);
    /* Orders first, whatever woke us: one that moves a deadline must be seen before the deadline is. */
    wire_read(&agent.wire, handle, NULL);
    reap();
    if (agent.zygote_socket >= 0)
        zygote_read();
    check_deadlines();
    for (struct session *x = agent.sessions; x; x = x->next)
        session_pump(x);
    for (struct stream *s = agent.streams; s; s = s->next)
        stream_pump(s);
    if (ready > 0)
        for (unsigned i = agent.num_sinks; i-- > 0;)
            if (first_sink + i < n && fds[first_sink + i].fd == agent.sinks[i] && fds[first_sink + i].revents) {
                discard(&agent.sinks[i]);
                if (agent.sinks[i] < 0)
                    agent.sinks[i] = agent.sinks[--agent.num_sinks];
            }
    sweep();
    wire_flush(&agent.wire);
}

static void arguments(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--plain")) {
            agent.plain = true;
            agent.zygote_script = NULL;
            continue;
        }
        if (value && !strcmp(argv[i], "--label"))
            ; /* tells the host which guest this process is the first of */
        else if (value && !strcmp(argv[i], "--tmpfs-bytes"))
            agent.tmpfs_bytes = strtoull(value, NULL, 10);
        else if (value && !strcmp(argv[i], "--zygote"))
            agent.zygote_script = value;
        else if (value && !strcmp(argv[i], "--python"))
            agent.python = value;
        else if (value && !strcmp(argv[i], "--shell"))
            agent.shell = value;
        else {
            fprintf(stderr, "agent: bad argument %s\n", argv[i]);
            _exit(64);
        }
        i++;
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "--contain"))
        return contain(argc - 2, argv + 2);
    arguments(argc, argv);
    signal(SIGPIPE, SIG_IGN);
    sigset_t blocked, waiting;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, &waiting);
    sigdelset(&waiting, SIGCHLD);
    struct sigaction action = {.sa_handler = child_ended};
    sigaction(SIGCHLD, &action, NULL);
    fcntl(0, F_SETFL, fcntl(0, F_GETFL) | O_NONBLOCK);
    fcntl(1, F_SETFL, fcntl(1, F_GETFL) | O_NONBLOCK);
    fcntl(0, F_SETFD, FD_CLOEXEC);
    fcntl(1, F_SETFD, FD_CLOEXEC);
    umask(022);
    new_boot_id();
    wire_open(&agent.wire, 0, 1);
    if (!agent.plain) {
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
        syscall(SYS_setgroups, 0, NULL);
        if (!fresh_mounts(false)) {
            fprintf(stderr, "agent: fresh folders: %s\n", strerror(errno));
            return 73;
        }
    }
    if (agent.zygote_script && !zygote_start()) {
        fprintf(stderr, "agent: the zygote %s does not start\n", agent.zygote_script);
        return 74;
    }
    while (!agent.wire.closed)
        turn(&waiting);
    return 0;
}
