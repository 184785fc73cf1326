/* Frames between the host and the agent: layout, checksums, the reading side's resynchronisation and the writing side's
 * replay list. Knows nothing about what frames mean. tidemill/sandbox/guest/protocol.py is the same layout in Python.
 *
 *   offset  0  u32 magic    "TDM1"
 *           4  u8  type
 *           5  u8  flags    MORE: the message goes on in the next frame of this stream; END: no data follows
 *           6  u16 zero
 *           8  u32 stream
 *          12  u32 length   of the payload, at most 65536
 *          16  u64 seq      counts this side's frames from 1
 *          24  u64 ack      last sequence number seen from the other side
 *          32  u32 crc      CRC-32 of the header with this field zero, then of the payload
 *          36  payload
 *
 * All numbers are little-endian. A reader that meets anything else looks for the next magic whose checksum holds; a writer
 * that takes over a pipe from a dead one first writes WIRE_PADDING zero bytes, which complete any frame left half written.
 */
#ifndef TIDEMILL_WIRE_H
#define TIDEMILL_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WIRE_MAGIC 0x314d4454u
#define WIRE_HEADER 36
#define WIRE_PAYLOAD 65536
#define WIRE_PADDING (WIRE_HEADER + WIRE_PAYLOAD)
#define WIRE_RETAINED (1024 * 1024) /* bytes of unacknowledged data frames after which no more data is read from anywhere */

enum { FLAG_MORE = 1, FLAG_END = 2 };

struct frame {
    uint8_t type, flags;
    uint32_t stream, length;
    uint64_t seq, ack;
    const uint8_t *payload;
};

/* One frame sent but not acknowledged, or not yet sent. */
struct outgoing {
    struct outgoing *next;
    uint64_t seq;
    size_t size, sent;
    uint8_t bytes[];
};

struct wire {
    int in, out;
    uint8_t *buffer;     /* of WIRE_PADDING bytes */
    size_t start, fill;  /* valid bytes are buffer[start..fill) */
    bool closed;         /* the host's end is gone or broken */
    uint64_t seen;       /* last sequence number from the host */
    uint64_t next_seq;
    struct outgoing *head, *tail; /* unacknowledged, oldest first */
    struct outgoing *cursor;      /* next to be written; NULL: all written */
    struct outgoing *gate;        /* nothing behind this frame is written until it is lifted */
    size_t retained;
};

typedef void wire_handler(void *context, const struct frame *frame);

void wire_open(struct wire *w, int in, int out);
/* Read what there is and hand each whole frame over. */
void wire_read(struct wire *w, wire_handler *handler, void *context);
/* Queue a frame; the payload is copied. Never blocks. */
void wire_send(struct wire *w, uint8_t type, uint8_t flags, uint32_t stream, const void *payload, size_t length);
/* Write what the pipe takes. */
void wire_flush(struct wire *w);
bool wire_pending(const struct wire *w);
/* Whether data frames may still be queued. */
bool wire_room(const struct wire *w);
void wire_acknowledge(struct wire *w, uint64_t seq);
/* Write everything after `seq` again. */
void wire_replay(struct wire *w, uint64_t seq);
/* Forget every frame: the host they were for is not the one that listens now. */
void wire_drop(struct wire *w);

/* A message is a row of fields: u8 tag, u32 length, bytes. */
struct field {
    uint8_t tag;
    uint32_t length;
    const uint8_t *bytes;
};
/* Step through fields; false at the end or where the message is malformed (then *bad is set). */
bool field_next(const uint8_t **at, const uint8_t *end, struct field *field, bool *bad);
uint64_t field_number(const struct field *field);
size_t field_put(uint8_t *at, uint8_t tag, const void *bytes, uint32_t length);
size_t field_put_number(uint8_t *at, uint8_t tag, uint64_t value);

#endif
