/* What the parts of the agent share: frame types, field tags, streams, live sessions.
 *
 * A stream is one request of the host and everything that belongs to it: a command, one cell in a session, a file going in or
 * out. A session outlives the streams that use it. One thread, one poll loop; nothing in it waits except for things that
 * untrusted code cannot delay.
 */
#ifndef TIDEMILL_AGENT_H
#define TIDEMILL_AGENT_H

#include "wire.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/types.h>

#define PROTOCOL_VERSION 1
#define USER_ID 1000
#define ZYGOTE_ID 999
#define INITIAL_CREDIT (256 * 1024)
#define CREDIT_STEP (128 * 1024)
#define MAX_REQUEST (4 * 1024 * 1024)
#define MAX_STREAMS 512
#define MAX_SESSIONS 64
#define MAX_SINKS 256
#define MAX_ARGUMENTS 4096

/* host -> guest, then guest -> host; the numbers stand in protocol.py too */
enum {
    T_HELLO = 1, T_EXEC, T_DATA, T_CREDIT, T_CANCEL, T_SESSION_OPEN, T_SESSION_RUN, T_SESSION_CLOSE, T_SESSION_LIST, T_PUT,
    T_GET, T_QUIESCE, T_CONTINUE, T_RESET, T_STAT, T_ACK, T_SHIFT,
    T_WELCOME = 64, T_STDOUT, T_STDERR, T_RESULT, T_ERROR, T_GRANT, T_QUIET, T_CONTENT,
};

enum {
    F_ARGV = 1, F_ENV, F_CWD, F_UID, F_TIMEOUT_MS, F_OUTPUT_LIMIT, F_NPROC, F_ADDRESS_SPACE, F_NOFILE, F_STDIN,
    F_IDENTITY, F_LAST_SEEN, F_GENERATION, F_ABANDON, F_SESSION, F_KIND, F_PATH, F_MODE, F_CODE, F_MAX_BYTES,
    F_EXIT_CODE = 64, F_SIGNAL, F_TIMED_OUT, F_TRUNCATED, F_DURATION_US, F_BOOT_ID, F_PID, F_BUSY, F_PROCESSES, F_NEEDS_FULL,
    F_DETAIL, F_VERSION, F_STREAMS, F_SESSIONS, F_SIZE, F_FIRST_SEQ,
};

enum { E_INPUT = 1, E_NOT_FOUND, E_BUSY, E_GONE, E_INTERNAL };

enum kind { KIND_EXEC, KIND_RUN, KIND_OPEN, KIND_PUT, KIND_GET, KIND_REQUEST };

struct limits {
    uint64_t nproc, address_space, nofile; /* 0: as it is */
};

struct stream {
    struct stream *next;
    uint32_t id;
    enum kind kind;
    uint8_t type;              /* of the request, while it is being received */
    uint8_t *request;          /* received so far */
    size_t request_length;
    bool orphan;               /* nobody listens: output is dropped, no result is sent */
    bool done;                 /* to be freed at the end of this turn */
    /* commands and cells */
    pid_t pid;
    int in, out, err;          /* our pipe ends, -1 when closed */
    bool exited;
    int wait_status;
    size_t drain[2];           /* bytes still taken from stdout and stderr after the end */
    uint64_t started_us, deadline_ms; /* 0: no deadline */
    uint64_t limit, taken;     /* output bytes allowed and sent */
    bool timed_out, truncated;
    int exit_code;             /* of a cell */
    bool cell_ended;
    uint64_t credit;           /* bytes we may send */
    uint64_t consumed;         /* bytes of the host's data used up since the last grant */
    uint8_t *input;            /* data not yet written to the process */
    size_t input_length, input_start;
    bool input_ended;
    struct session *session;
    /* files */
    int file;
    char *path, *partial;
    uint64_t size, max_bytes;
    mode_t mode;
};

struct session {
    struct session *next;
    uint32_t id;
    bool python;
    bool opening;              /* asked of the zygote, not yet answered */
    bool ended;
    bool reseed;
    pid_t pid;
    int command, out, err, status; /* our ends */
    uint8_t *code;             /* not yet written to `command` */
    size_t code_length, code_start;
    uint8_t answer[8];
    size_t answered;
    int wait_status;
    bool wait_known;
    struct stream *open_stream; /* waits for the answer to its opening */
    struct stream *run;
};

struct agent {
    struct wire wire;
    bool plain;                /* under test on a host: no mounts, no users, no zygote unless given */
    const char *zygote_script, *python, *shell;
    uint64_t tmpfs_bytes;
    bool greeted, quiet, root_used, stopping;
    uint64_t quiet_since_ms;
    uint8_t identity[16];
    char boot_id[33];
    uint64_t generation;
    struct stream *streams;
    unsigned num_streams;
    struct session *sessions;
    unsigned num_sessions;
    uint32_t next_session;
    int sinks[MAX_SINKS];      /* output of processes whose command has ended: read and dropped */
    unsigned num_sinks;
    pid_t zygote;
    int zygote_socket;
};

extern struct agent agent;

/* agent.c */
uint64_t now_ms(void);
uint64_t now_us(void);
void fail(struct stream *s, int kind, const char *format, ...) __attribute__((format(printf, 3, 4)));
void finish(struct stream *s);
void close_fd(int *fd);
struct stream *find_stream(uint32_t id);
struct session *find_session(uint32_t id);

/* process.c */
struct launch {
    char *const *argv, *const *envp;
    const char *cwd, *path;
    uid_t uid;
    bool keep_identity;        /* as the agent itself (plain mode), or as root */
    bool zygote;               /* keep only CAP_SETUID and CAP_SETGID */
    int fds[3], extra_from[2], extra_to[2];
    struct limits limits;
};
/* Start a process in a session of its own. Returns its pid, or -errno with *stage naming what failed. */
pid_t launch(const struct launch *l, const char **stage);
bool make_pipe(int ends[2], bool ours_is_read);
void exec_request(struct stream *s, const uint8_t *at, size_t length);
void stream_input(struct stream *s, const uint8_t *bytes, size_t length, bool end);
bool stream_poll(struct stream *s, struct pollfd *fds, unsigned *n);
void stream_pump(struct stream *s);
void stream_kill(struct stream *s);
/* Read from *fd into T_STDOUT or T_STDERR frames of `s`, within credit and limit; closes *fd at its end.
 * Returns true while more may be readable at once. `budget`: bytes at most, counted down. */
bool forward(struct stream *s, int *fd, uint8_t type, size_t *budget);
void discard(int *fd);
void send_result(struct stream *s, bool killed, int exit_code, int signal);
void keep_sink(int *fd);
void reap(void);

/* session.c */
void session_open(struct stream *s, const uint8_t *at, size_t length);
void session_run(struct stream *s, const uint8_t *at, size_t length);
void session_close(struct stream *s, const uint8_t *at, size_t length);
void session_poll(struct session *x, struct pollfd *fds, unsigned *n);
void session_pump(struct session *x);
void session_kill(struct session *x);
void session_exited(struct session *x, int wait_status);
void sessions_sweep(void);
bool zygote_start(void);
void zygote_read(void);
void zygote_lost(void);

/* files.c */
void put_request(struct stream *s, const uint8_t *at, size_t length);
void put_data(struct stream *s, const uint8_t *bytes, size_t length, bool end);
void get_request(struct stream *s, const uint8_t *at, size_t length);
void get_pump(struct stream *s);
void file_abandon(struct stream *s);
/* Run with the rights of the sandbox's user until user_leave(). */
void user_enter(void);
void user_leave(void);

/* contain.c */
int contain(int argc, char **argv);

/* reset.c */
bool fresh_mounts(bool replace);
void reset_request(struct stream *s);
int count_processes(void);

#endif
