#include "wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint32_t crc_table[8][256];

static void crc_prepare(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++)
            c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
        crc_table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            crc_table[t][i] = (crc_table[t - 1][i] >> 8) ^ crc_table[0][crc_table[t - 1][i] & 255];
}

static uint32_t read32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static uint64_t read64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

/* CRC-32 (the one of zlib), eight bytes at a time. */
static uint32_t crc_more(uint32_t crc, const uint8_t *p, size_t n)
{
    crc = ~crc;
    for (; n >= 8; p += 8, n -= 8) {
        uint32_t a = read32(p) ^ crc, b = read32(p + 4);
        crc = crc_table[7][a & 255] ^ crc_table[6][(a >> 8) & 255] ^ crc_table[5][(a >> 16) & 255] ^ crc_table[4][a >> 24]
            ^ crc_table[3][b & 255] ^ crc_table[2][(b >> 8) & 255] ^ crc_table[1][(b >> 16) & 255] ^ crc_table[0][b >> 24];
    }
    for (; n; p++, n--)
        crc = crc_table[0][(crc ^ *p) & 255] ^ (crc >> 8);
    return ~crc;
}

static uint32_t frame_crc(const uint8_t *header, const uint8_t *payload, size_t length)
{
    static const uint8_t zero[4];
    uint32_t crc = crc_more(0, header, 32);
    crc = crc_more(crc, zero, 4);
    return crc_more(crc, payload, length);
}

void wire_open(struct wire *w, int in, int out)
{
    crc_prepare();
    memset(w, 0, sizeof *w);
    w->in = in;
    w->out = out;
    w->next_seq = 1;
    w->buffer = malloc(WIRE_PADDING);
    if (!w->buffer)
        _exit(70);
}

/* Take whole frames off the buffer. Bytes that are no frame are skipped one by one, up to the next magic. */
static void take_frames(struct wire *w, wire_handler *handler, void *context)
{
    while (w->fill - w->start >= WIRE_HEADER) {
        uint8_t *p = w->buffer + w->start;
        if (read32(p) != WIRE_MAGIC) {
            uint8_t *next = memchr(p + 1, WIRE_MAGIC & 255, w->fill - w->start - 1);
            w->start = next ? (size_t)(next - w->buffer) : w->fill;
            continue;
        }
        uint32_t length = read32(p + 12);
        if (length > WIRE_PAYLOAD) {
            w->start++;
            continue;
        }
        if (w->fill - w->start < WIRE_HEADER + length)
            return;
        if (frame_crc(p, p + WIRE_HEADER, length) != read32(p + 32)) {
            w->start++;
            continue;
        }
        struct frame frame = {.type = p[4], .flags = p[5], .stream = read32(p + 8), .length = length,
                              .seq = read64(p + 16), .ack = read64(p + 24), .payload = p + WIRE_HEADER};
        w->start += WIRE_HEADER + length;
        handler(context, &frame);
    }
}

void wire_read(struct wire *w, wire_handler *handler, void *context)
{
    /* A few rounds only, so that a fast writer cannot keep the agent from its other work. */
    for (int round = 0; round < 4; round++) {
        if (w->start) {
            memmove(w->buffer, w->buffer + w->start, w->fill - w->start);
            w->fill -= w->start;
            w->start = 0;
        }
        ssize_t n = read(w->in, w->buffer + w->fill, WIRE_PADDING - w->fill);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n <= 0) {
            w->closed = true;
            return;
        }
        w->fill += (size_t)n;
        take_frames(w, handler, context);
    }
}

void wire_send(struct wire *w, uint8_t type, uint8_t flags, uint32_t stream, const void *payload, size_t length)
{
    struct outgoing *o = malloc(sizeof *o + WIRE_HEADER + length);
    if (!o || length > WIRE_PAYLOAD)
        _exit(70);
    uint32_t magic = WIRE_MAGIC, size = (uint32_t)length, crc;
    uint8_t *p = o->bytes;
    o->next = NULL;
    o->seq = w->next_seq++;
    o->size = WIRE_HEADER + length;
    o->sent = 0;
    memset(p, 0, WIRE_HEADER);
    memcpy(p, &magic, 4);
    p[4] = type;
    p[5] = flags;
    memcpy(p + 8, &stream, 4);
    memcpy(p + 12, &size, 4);
    memcpy(p + 16, &o->seq, 8);
    memcpy(p + 24, &w->seen, 8);
    if (length)
        memcpy(p + WIRE_HEADER, payload, length);
    crc = frame_crc(p, p + WIRE_HEADER, length);
    memcpy(p + 32, &crc, 4);
    if (w->tail)
        w->tail->next = o;
    else
        w->head = o;
    w->tail = o;
    if (!w->cursor)
        w->cursor = o;
    w->retained += o->size;
}

bool wire_pending(const struct wire *w)
{
    return w->cursor && !(w->gate && w->cursor->seq > w->gate->seq);
}

bool wire_room(const struct wire *w)
{
    return w->retained < WIRE_RETAINED;
}

void wire_flush(struct wire *w)
{
    while (wire_pending(w)) {
        struct outgoing *o = w->cursor;
        ssize_t n = write(w->out, o->bytes + o->sent, o->size - o->sent);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                w->closed = true;
            return;
        }
        o->sent += (size_t)n;
        if (o->sent == o->size)
            w->cursor = o->next;
    }
}

void wire_acknowledge(struct wire *w, uint64_t seq)
{
    while (w->head && w->head->seq <= seq && w->head != w->cursor && w->head != w->gate) {
        struct outgoing *o = w->head;
        w->head = o->next;
        if (!w->head)
            w->tail = NULL;
        w->retained -= o->size;
        free(o);
    }
}

void wire_replay(struct wire *w, uint64_t seq)
{
    w->gate = NULL;
    /* A frame that is half in the pipe is completed first: its beginning may have been read. */
    struct outgoing *half = w->cursor && w->cursor->sent ? w->cursor : NULL;
    if (half)
        while (half->sent < half->size) {
            ssize_t n = write(w->out, half->bytes + half->sent, half->size - half->sent);
            if (n > 0)
                half->sent += (size_t)n;
            else if (n < 0 && errno != EINTR && errno != EAGAIN) {
                w->closed = true;
                return;
            } else if (n < 0 && errno == EAGAIN)
                usleep(200);
        }
    w->cursor = NULL;
    wire_acknowledge(w, seq);
    for (struct outgoing *o = w->head; o; o = o->next)
        o->sent = 0;
    w->cursor = w->head;
}

void wire_drop(struct wire *w)
{
    w->gate = w->cursor = NULL;
    wire_acknowledge(w, UINT64_MAX);
}

bool field_next(const uint8_t **at, const uint8_t *end, struct field *field, bool *bad)
{
    const uint8_t *p = *at;
    if (p == end)
        return false;
    if (end - p < 5 || read32(p + 1) > (size_t)(end - p - 5)) {
        *bad = true;
        return false;
    }
    field->tag = p[0];
    field->length = read32(p + 1);
    field->bytes = p + 5;
    *at = p + 5 + field->length;
    return true;
}

uint64_t field_number(const struct field *field)
{
    return field->length == 8 ? read64(field->bytes) : 0;
}

size_t field_put(uint8_t *at, uint8_t tag, const void *bytes, uint32_t length)
{
    at[0] = tag;
    memcpy(at + 1, &length, 4);
    if (length)
        memcpy(at + 5, bytes, length);
    return 5 + length;
}

size_t field_put_number(uint8_t *at, uint8_t tag, uint64_t value)
{
    return field_put(at, tag, &value, 8);
}
