/* Files in and out, with the rights of the sandbox's user: whatever the user's links and folders point at, nothing is reached
 * that the user could not reach. A file going in appears under its name only when it is whole.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The saved and real ids stay root's, so the user can neither signal nor trace the agent meanwhile. */
void user_enter(void)
{
    if (!agent.plain && (syscall(SYS_setresgid, -1, USER_ID, -1) < 0 || syscall(SYS_setresuid, -1, USER_ID, -1) < 0))
        _exit(71);
}

void user_leave(void)
{
    if (!agent.plain && (syscall(SYS_setresuid, -1, 0, -1) < 0 || syscall(SYS_setresgid, -1, 0, -1) < 0))
        _exit(71);
}

static void refuse(struct stream *s, int error)
{
    fail(s, error == ENOENT || error == ENOTDIR ? E_NOT_FOUND : error == EIO ? E_INTERNAL : E_INPUT, "%s: %s",
         s->path ? s->path : "?", strerror(error));
}

static bool read_path(struct stream *s, const struct field *f)
{
    free(s->path);
    s->path = NULL;
    if (!f->length || f->length > 4000 || memchr(f->bytes, 0, f->length))
        return false;
    if (f->bytes[0] == '/') {
        s->path = strndup((const char *)f->bytes, f->length);
        return s->path != NULL;
    }
    return asprintf(&s->path, "/home/user/%.*s", (int)f->length, (const char *)f->bytes) > 0;
}

/* Make the folders above `path`. Returns 0 or an errno. */
static int make_parents(char *path)
{
    for (char *p = strchr(path + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = 0;
        int error = mkdir(path, 0755) < 0 ? errno : 0;
        *p = '/';
        if (error && error != EEXIST && error != EACCES && error != EROFS)
            return error;
    }
    return 0;
}

void put_request(struct stream *s, const uint8_t *at, size_t length)
{
    static unsigned counter;
    struct field f;
    bool bad = false;
    s->kind = KIND_PUT;
    s->mode = 0644;
    s->max_bytes = UINT64_MAX;
    for (const uint8_t *end = at + length; !bad && field_next(&at, end, &f, &bad);)
        switch (f.tag) {
        case F_PATH: bad = !read_path(s, &f); break;
        case F_MODE: s->mode = (mode_t)(field_number(&f) & 07777); break;
        case F_MAX_BYTES: s->max_bytes = field_number(&f); break;
        default: break;
        }
    if (bad || !s->path) {
        fail(s, E_INPUT, "the path is empty, longer than 4000 bytes or holds a zero byte");
        return;
    }
    user_enter();
    struct stat there;
    int error = make_parents(s->path);
    if (!error && s->path[strlen(s->path) - 1] == '/')
        error = EISDIR;
    if (!error && stat(s->path, &there) == 0 && S_ISDIR(there.st_mode))
        error = EISDIR;
    if (!error) {
        char *slash = strrchr(s->path, '/');
        if (asprintf(&s->partial, "%.*s/.%.60s.%u.part", (int)(slash - s->path), s->path, slash + 1, ++counter) < 0)
            _exit(70);
        s->file = open(s->partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (s->file < 0) {
            error = errno;
            free(s->partial);
            s->partial = NULL;
        }
    }
    user_leave();
    if (error)
        fail(s, E_INPUT, "%s: %s", s->path, strerror(error));
}

void put_data(struct stream *s, const uint8_t *bytes, size_t length, bool end)
{
    uint8_t p[16];
    size_t done = 0;
    s->size += length;
    if (s->size > s->max_bytes) {
        fail(s, E_INPUT, "%s: more than the %llu bytes that were announced", s->path, (unsigned long long)s->max_bytes);
        return;
    }
    while (done < length) {
        ssize_t n = write(s->file, bytes + done, length - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            fail(s, E_INPUT, "%s: %s", s->path, strerror(n < 0 ? errno : ENOSPC));
            return;
        }
        done += (size_t)n;
    }
    if (!end) {
        s->consumed += length;
        if (s->consumed >= CREDIT_STEP) {
            size_t n = field_put_number(p, F_SIZE, s->consumed);
            s->consumed = 0;
            wire_send(&agent.wire, T_GRANT, 0, s->id, p, n);
        }
        return;
    }
    int error = 0;
    user_enter();
    if (fchmod(s->file, s->mode) < 0 || rename(s->partial, s->path) < 0)
        error = errno;
    else {
        free(s->partial);
        s->partial = NULL;
    }
    user_leave();
    if (error)
        fail(s, E_INPUT, "%s: %s", s->path, strerror(error));
    else {
        wire_send(&agent.wire, T_RESULT, 0, s->id, p, field_put_number(p, F_SIZE, s->size));
        finish(s);
    }
}

void get_request(struct stream *s, const uint8_t *at, size_t length)
{
    struct field f;
    bool bad = false;
    s->kind = KIND_GET;
    s->credit = INITIAL_CREDIT;
    s->max_bytes = UINT64_MAX;
    for (const uint8_t *end = at + length; !bad && field_next(&at, end, &f, &bad);)
        switch (f.tag) {
        case F_PATH: bad = !read_path(s, &f); break;
        case F_MAX_BYTES: s->max_bytes = field_number(&f); break;
        default: break;
        }
    if (bad || !s->path) {
        fail(s, E_INPUT, "the path is empty, longer than 4000 bytes or holds a zero byte");
        return;
    }
    struct stat info;
    user_enter();
    /* O_NONBLOCK: a named pipe put there by the user must not stop the agent. */
    s->file = open(s->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    int error = s->file < 0 ? errno : 0;
    user_leave();
    if (!error && fstat(s->file, &info) < 0)
        error = errno;
    if (error)
        refuse(s, error);
    else if (!S_ISREG(info.st_mode))
        fail(s, E_INPUT, "%s: not a file", s->path);
    else if ((uint64_t)info.st_size > s->max_bytes)
        fail(s, E_INPUT, "%s has %lld bytes, more than %llu", s->path, (long long)info.st_size, (unsigned long long)s->max_bytes);
}

void get_pump(struct stream *s)
{
    static uint8_t buffer[WIRE_PAYLOAD];
    for (int round = 0; round < 4 && !s->done && s->credit && wire_room(&agent.wire) && !agent.quiet; round++) {
        ssize_t n = read(s->file, buffer, s->credit < sizeof buffer ? s->credit : sizeof buffer);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            refuse(s, errno);
        else if (n == 0) {
            uint8_t p[16];
            wire_send(&agent.wire, T_RESULT, 0, s->id, p, field_put_number(p, F_SIZE, s->size));
            finish(s);
        } else if ((s->size += (uint64_t)n) > s->max_bytes)
            fail(s, E_INPUT, "%s has more than %llu bytes", s->path, (unsigned long long)s->max_bytes);
        else {
            s->credit -= (uint64_t)n;
            wire_send(&agent.wire, T_CONTENT, 0, s->id, buffer, (size_t)n);
        }
    }
}

void file_abandon(struct stream *s)
{
    close_fd(&s->file);
    if (s->partial) {
        user_enter();
        unlink(s->partial);
        user_leave();
    }
    free(s->partial);
    free(s->path);
    s->partial = s->path = NULL;
}
