/* A small app that knows nothing but docs/WIRE.md: two of them count to a number together, each adding one to what
 * the other said. It speaks the base protocol alone and aborts at whatever that does not have.
 *
 * client --peer NAME --count N --port P [--host H] [--send-port S [--listen]] [--begin] [--no-attach] [--clock]
 *        [--flood M] [--posts]
 *
 * Without --send-port one connection serves both directions; with it the client connects to that port, too, or with
 * --listen waits there for its coordinator. --begin: at the very first start, this one says the first number.
 * --no-attach: it calls its peer without AttachTo. --clock: with each number that it says it calls itself with the time.
 * --posts: the two count by calls of method -1, as bindings that post do.
 * --flood: when it is new it sends itself a batch of M impulses of 1 MiB each, then a call that is too large.
 * Upgraded, it sends itself an impulse at once. Lines on stdout: "new", "restored N", "primary", "upgraded",
 * "checkpoint N", "at N" (each tenth number), "done N notes M", "tick N" (each tenth), "woken N",
 * "flooded N". It ends with status 0 when its coordinator leaves.
 */
#define _POSIX_C_SOURCE 200809L

#include <netdb.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { RPC = 0, ATTACH_TO = 1, TAKE_CHECKPOINT = 2, RPC_BATCH = 5, CHECKPOINT = 8, INITIAL = 9, UPGRADE = 10 };
enum { BECOME_PRIMARY = 11 };
enum { CALL = 0, FORK = 1, IMPULSE = 2 };    /* an RPC's kind, and its types */
enum { POSTED = -1, COUNT = 1, NOTE = 2, TICK = 3, WAKE = 4, FLOOD = 5, START = 32 }; /* this app's methods */
enum { CONTROL = -1, CHECKPOINT_RECORD = -2 }; /* sequence IDs that are none */

#define HEADER_SIZE 24
#define RECORD_SIZE_MAX (1 << 30)
#define NAME_SIZE_MAX 255
#define FLOOD_SIZE (1 << 20)
#define TOO_LARGE_SIZE (65 << 20) /* of arguments; the coordinator takes 64 MiB */

/* What a checkpoint holds, in this order, 8 bytes each. */
struct state {
    int64_t committer_id;
    int64_t sequence_id; /* of the last record that was handled */
    int64_t counter;     /* the last number that was said, by either */
    int64_t notes;       /* calls that came behind a number, in a batch with it */
    int64_t ticks;       /* calls of its own with the time */
    int64_t last_tick;   /* that time, in ns */
    int64_t wakes;       /* its own impulses */
};
#define BLOB_SIZE 56

static struct state state = {0, -1, 0, 0, 0, 0, 0};
static const char *peer_name = "";
static int64_t target, flood_count, flooded;
static bool begins;
static int count_method = COUNT;
static bool attached;
static bool has_clock;
static bool has_state;
static int from_coordinator, to_coordinator;

static void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "client: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    abort();
}

static void tell(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    printf("\n");
    fflush(stdout);
    va_end(arguments);
}

/* --- primitives --------------------------------------------------------------------------------------------------- */

static uint64_t read_fixed(const uint8_t *bytes, int size)
{
    uint64_t value = 0;
    for (int index = size - 1; index >= 0; index--)
        value = value << 8 | bytes[index];
    return value;
}

static void write_fixed(uint8_t *bytes, int size, uint64_t value)
{
    for (int index = 0; index < size; index++, value >>= 8)
        bytes[index] = (uint8_t)value;
}

/* Moves *at behind the number. */
static int64_t read_zigzag(const uint8_t **at, const uint8_t *end, int size_max)
{
    uint64_t value = 0;
    for (int index = 0; index < size_max; index++) {
        if (*at == end)
            fail("a number runs past the end of its message");
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 0x7f) << (7 * index);
        if (!(byte & 0x80))
            return (int64_t)(value >> 1) ^ -(int64_t)(value & 1);
    }
    fail("a number has more than %d bytes", size_max);
    return 0;
}

static size_t write_zigzag(uint8_t *bytes, int64_t number)
{
    uint64_t value = (uint64_t)number << 1 ^ (number < 0 ? UINT64_MAX : 0);
    size_t size = 0;
    for (; value > 0x7f; value >>= 7)
        bytes[size++] = (uint8_t)(value | 0x80);
    bytes[size++] = (uint8_t)value;
    return size;
}

/* CRC-64/XZ; crc: of what comes before, 0 at the start. */
static uint64_t crc64(uint64_t crc, const uint8_t *bytes, size_t size)
{
    crc = ~crc;
    for (size_t index = 0; index < size; index++) {
        crc ^= bytes[index];
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ UINT64_C(0xC96C5795D7870F42) : crc >> 1;
    }
    return ~crc;
}

/* --- the connections ---------------------------------------------------------------------------------------------- */

static struct addrinfo *resolve(const char *host, const char *port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
    struct addrinfo *found;
    if (getaddrinfo(host, port, &hints, &found))
        fail("%s:%s is no address", host, port);
    return found;
}

static int connect_to(const char *host, const char *port)
{
    struct addrinfo *address = resolve(host, port);
    int connection = socket(address->ai_family, SOCK_STREAM, 0);
    if (connection < 0 || connect(connection, address->ai_addr, address->ai_addrlen))
        fail("no coordinator at %s:%s", host, port);
    freeaddrinfo(address);
    return connection;
}

static int listen_at(const char *host, const char *port)
{
    struct addrinfo *address = resolve(host, port);
    int listening = socket(address->ai_family, SOCK_STREAM, 0), yes = 1;
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listening, address->ai_addr, address->ai_addrlen) || listen(listening, 1))
        fail("cannot listen at %s:%s", host, port);
    freeaddrinfo(address);
    return listening;
}

static void send_bytes(const uint8_t *bytes, size_t size)
{
    while (size) {
        ssize_t sent = send(to_coordinator, bytes, size, MSG_NOSIGNAL);
        if (sent <= 0)
            exit(0); /* it left */
        bytes += sent;
        size -= (size_t)sent;
    }
}

static void receive_bytes(uint8_t *bytes, size_t size)
{
    while (size) {
        ssize_t received = recv(from_coordinator, bytes, size, 0);
        if (received <= 0)
            exit(0); /* it left; what is incomplete counts for nothing */
        bytes += received;
        size -= (size_t)received;
    }
}

/* --- speaking ----------------------------------------------------------------------------------------------------- */

static size_t write_message(uint8_t *bytes, uint8_t type, const uint8_t *data, size_t size)
{
    size_t at = write_zigzag(bytes, (int64_t)size + 1);
    bytes[at++] = type;
    memcpy(bytes + at, data, size);
    return at + size;
}

static void send_message(uint8_t type, const uint8_t *data, size_t size)
{
    uint8_t bytes[1024];
    send_bytes(bytes, write_message(bytes, type, data, size));
}

static size_t write_rpc(uint8_t *bytes, const char *name, int method, uint8_t type, int64_t argument)
{
    uint8_t data[NAME_SIZE_MAX + 32];
    size_t name_size = strlen(name), size = write_zigzag(data, (int64_t)name_size);
    memcpy(data + size, name, name_size);
    size += name_size;
    data[size++] = CALL;
    size += write_zigzag(data + size, method);
    data[size++] = type;
    write_fixed(data + size, 8, (uint64_t)argument);
    return write_message(bytes, RPC, data, size + 8);
}

static size_t write_call(uint8_t *bytes, int method, int64_t argument)
{
    return write_rpc(bytes, peer_name, method, FORK, argument);
}

static void call_oneself(int method, uint8_t type, int64_t argument)
{
    uint8_t bytes[64];
    send_bytes(bytes, write_rpc(bytes, "", method, type, argument));
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Say a number to the peer: each fifth in a batch, with a note behind it. */
static void say(int64_t number)
{
    uint8_t bytes[1024];
    if (!attached)
        send_message(ATTACH_TO, (const uint8_t *)peer_name, strlen(peer_name));
    attached = true;
    if (number % 5) {
        send_bytes(bytes, write_call(bytes, count_method, number));
    } else {
        size_t size = write_zigzag(bytes, 2);
        size += write_call(bytes + size, count_method, number);
        size += write_call(bytes + size, NOTE, number);
        send_message(RPC_BATCH, bytes, size);
    }
    if (has_clock)
        call_oneself(TICK, FORK, now_ns());
    state.counter = number;
}

/* Zeros as the arguments of a call to oneself, behind what stands in front of them. */
static void send_large(uint8_t type, int64_t size)
{
    static const uint8_t zeros[FLOOD_SIZE];
    uint8_t front[16] = {0};
    size_t at = write_zigzag(front, 5 + size); /* type, destination, kind, method, RPC type */
    front[at++] = RPC;
    front[at++] = 0; /* oneself */
    front[at++] = CALL;
    at += write_zigzag(front + at, FLOOD);
    front[at++] = type;
    send_bytes(front, at);
    for (; size > FLOOD_SIZE; size -= FLOOD_SIZE)
        send_bytes(zeros, FLOOD_SIZE);
    send_bytes(zeros, (size_t)size);
}

static void flood(void)
{
    uint8_t front[16], one[16];
    size_t one_size = write_zigzag(one, 5 + FLOOD_SIZE) + 5 + FLOOD_SIZE, count_size = write_zigzag(one, flood_count);
    size_t at = write_zigzag(front, 1 + (int64_t)count_size + flood_count * (int64_t)one_size);
    front[at++] = RPC_BATCH;
    at += write_zigzag(front + at, flood_count);
    send_bytes(front, at);
    for (int64_t index = 0; index < flood_count; index++)
        send_large(IMPULSE, FLOOD_SIZE);
    send_large(FORK, TOO_LARGE_SIZE);
}

static void send_initial_message(void)
{
    uint8_t call[16], message[32];
    size_t size = 0;
    call[size++] = CALL;
    size += write_zigzag(call + size, START);
    call[size++] = FORK;
    call[size++] = begins;
    size = write_message(message, RPC, call, size);
    send_message(INITIAL, message, size);
}

static void send_checkpoint(void)
{
    uint8_t size[8], blob[BLOB_SIZE];
    write_fixed(size, 8, BLOB_SIZE);
    write_fixed(blob, 8, (uint64_t)state.committer_id);
    write_fixed(blob + 8, 8, (uint64_t)state.sequence_id);
    write_fixed(blob + 16, 8, (uint64_t)state.counter);
    write_fixed(blob + 24, 8, (uint64_t)state.notes);
    write_fixed(blob + 32, 8, (uint64_t)state.ticks);
    write_fixed(blob + 40, 8, (uint64_t)state.last_tick);
    write_fixed(blob + 48, 8, (uint64_t)state.wakes);
    send_message(CHECKPOINT, size, 8);
    send_bytes(blob, BLOB_SIZE);
}

/* --- being called ------------------------------------------------------------------------------------------------- */

static void tell_progress(int64_t counter_before)
{
    if (state.counter / 10 > counter_before / 10)
        tell("at %lld", (long long)(state.counter / 10 * 10));
    if (state.counter > counter_before && state.counter >= target)
        tell("done %lld notes %lld", (long long)state.counter, (long long)state.notes);
}

static void be_called(const uint8_t *data, const uint8_t *end)
{
    if (data == end || *data++ != CALL)
        fail("an RPC that is no call");
    int64_t method = read_zigzag(&data, end, 5);
    if (data == end || *data++ != (method == WAKE || method == FLOOD ? IMPULSE : FORK))
        fail("an RPC of another type than it was sent with");
    if (method == START && end - data == 1) {
        if (*data)
            say(1);
        return;
    }
    if (method == FLOOD && end - data == FLOOD_SIZE) {
        tell("flooded %lld", (long long)++flooded);
        return;
    }
    if (end - data != 8)
        fail("method %lld came with %lld bytes", (long long)method, (long long)(end - data));
    int64_t number = (int64_t)read_fixed(data, 8);
    if (method == WAKE) {
        state.wakes++;
        tell("woken %lld", (long long)state.wakes);
        return;
    }
    if (method == TICK) {
        if (number <= state.last_tick)
            fail("the time went back, or came twice");
        state.last_tick = number;
        if (++state.ticks % 10 == 0)
            tell("tick %lld", (long long)state.ticks);
        return;
    }
    if (method == NOTE) {
        state.notes++;
        if (number % 5 || number > state.counter)
            fail("a note to %lld, the counter is at %lld", (long long)number, (long long)state.counter);
        return;
    }
    if (method != count_method || number != state.counter + 1)
        fail("method %lld with %lld, %lld was next", (long long)method, (long long)number,
             (long long)(state.counter + 1));
    state.counter = number;
    if (number < target)
        say(number + 1);
}

/* One message of a record; moves *at behind it. Its type, data and data's end. */
static uint8_t next_message(const uint8_t **at, const uint8_t *end, const uint8_t **data, const uint8_t **data_end)
{
    int64_t size = read_zigzag(at, end, 5);
    if (size < 1 || size > end - *at)
        fail("a message of %lld bytes in a rest of %lld", (long long)size, (long long)(end - *at));
    uint8_t type = **at;
    *data = *at + 1;
    *data_end = *at + size;
    *at += size;
    return type;
}

static void handle_batch(const uint8_t *at, const uint8_t *end)
{
    const uint8_t *data, *data_end;
    int64_t count = read_zigzag(&at, end, 5);
    for (; count > 0 && at < end; count--) {
        uint8_t type = next_message(&at, end, &data, &data_end);
        if (type != RPC)
            fail("a batch holds a message of type %u", type);
        be_called(data, data_end);
    }
    if (count || at != end)
        fail("a batch's count is wrong by %lld, %lld bytes are left", (long long)count, (long long)(end - at));
}

static void handle_logged(uint8_t type, const uint8_t *data, const uint8_t *data_end)
{
    const uint8_t *inner, *inner_end;
    switch (type) {
    case RPC:
        be_called(data, data_end);
        break;
    case RPC_BATCH:
        handle_batch(data, data_end);
        break;
    case INITIAL:
        if (state.sequence_id != 0)
            fail("an InitialMessage in record %lld", (long long)state.sequence_id);
        if (next_message(&data, data_end, &inner, &inner_end) != RPC || data != data_end)
            fail("the InitialMessage is not the one that was sent");
        be_called(inner, inner_end);
        break;
    default:
        fail("a logged message of type %u, which the base protocol does not have", type);
    }
}

static void handle_control(uint8_t type)
{
    switch (type) {
    case BECOME_PRIMARY: {
        bool is_new = !has_state;
        if (is_new) {
            tell("new");
            send_initial_message();
        }
        has_state = true;
        send_checkpoint();
        tell("primary");
        if (is_new && flood_count)
            flood();
        break;
    }
    case UPGRADE:
        if (!has_state)
            fail("an upgrade before there is a state");
        send_checkpoint();
        call_oneself(WAKE, IMPULSE, 0); /* it takes itself for primary */
        tell("upgraded");
        break;
    case TAKE_CHECKPOINT:
        if (!has_state)
            fail("a checkpoint is asked for before there is a state");
        send_checkpoint();
        tell("checkpoint %lld", (long long)state.counter);
        break;
    default:
        fail("a control message of type %u, which the base protocol does not have", type);
    }
}

static void restore(const uint8_t *data, const uint8_t *end, int64_t committer_id)
{
    uint8_t blob[BLOB_SIZE];
    if (has_state)
        fail("a second checkpoint to restore");
    int64_t size = read_zigzag(&data, end, 10);
    if (size != BLOB_SIZE || data != end)
        fail("a checkpoint of %lld bytes, %d were given", (long long)size, BLOB_SIZE);
    receive_bytes(blob, BLOB_SIZE);
    state.committer_id = (int64_t)read_fixed(blob, 8);
    state.sequence_id = (int64_t)read_fixed(blob + 8, 8);
    state.counter = (int64_t)read_fixed(blob + 16, 8);
    state.notes = (int64_t)read_fixed(blob + 24, 8);
    state.ticks = (int64_t)read_fixed(blob + 32, 8);
    state.last_tick = (int64_t)read_fixed(blob + 40, 8);
    state.wakes = (int64_t)read_fixed(blob + 48, 8);
    if (state.committer_id && state.committer_id != committer_id)
        fail("the committer ID was %lld and is %lld", (long long)state.committer_id, (long long)committer_id);
    has_state = true;
    tell("restored %lld", (long long)state.counter);
}

/* --- records ------------------------------------------------------------------------------------------------------ */

static void check_header(const uint8_t *header, const uint8_t *content, size_t content_size)
{
    int64_t committer_id = (int32_t)read_fixed(header, 4);
    uint64_t crc = crc64(crc64(crc64(0, header, 8), header + 16, 8), content, content_size);
    if (crc != read_fixed(header + 8, 8))
        fail("the check bytes of record %lld are wrong", (long long)read_fixed(header + 16, 8));
    if (committer_id < 1)
        fail("the committer ID is %lld", (long long)committer_id);
    if (state.committer_id && committer_id != state.committer_id)
        fail("the committer ID was %lld and is %lld", (long long)state.committer_id, (long long)committer_id);
    state.committer_id = committer_id;
}

static void handle_record(const uint8_t *header, const uint8_t *content, size_t content_size)
{
    const uint8_t *at = content, *end = content + content_size, *data, *data_end;
    int64_t sequence_id = (int64_t)read_fixed(header + 16, 8);
    if (sequence_id >= 0) {
        if (!has_state || sequence_id != state.sequence_id + 1)
            fail("record %lld, %lld was next", (long long)sequence_id, (long long)(state.sequence_id + 1));
        int64_t counter_before = state.counter;
        state.sequence_id = sequence_id;
        while (at < end) {
            uint8_t type = next_message(&at, end, &data, &data_end);
            handle_logged(type, data, data_end);
        }
        tell_progress(counter_before);
        return;
    }
    uint8_t type = next_message(&at, end, &data, &data_end);
    if (at != end)
        fail("a record with sequence ID %lld holds more than one message", (long long)sequence_id);
    if (sequence_id == CHECKPOINT_RECORD && type == CHECKPOINT)
        restore(data, data_end, state.committer_id);
    else if (sequence_id == CONTROL && type != CHECKPOINT && data == data_end)
        handle_control(type);
    else
        fail("a message of type %u in a record with sequence ID %lld", type, (long long)sequence_id);
}

static void serve(void)
{
    for (;;) {
        uint8_t header[HEADER_SIZE];
        receive_bytes(header, HEADER_SIZE);
        int64_t size = (int32_t)read_fixed(header + 4, 4);
        if (size < HEADER_SIZE || size > RECORD_SIZE_MAX)
            fail("a record of %lld bytes", (long long)size);
        size_t content_size = (size_t)size - HEADER_SIZE;
        uint8_t *content = malloc(content_size + 1);
        if (!content)
            fail("no memory for a record of %lld bytes", (long long)size);
        receive_bytes(content, content_size);
        check_header(header, content, content_size);
        handle_record(header, content, content_size);
        free(content);
    }
}

static void connect_all(const char *host, const char *port, const char *send_port, bool listens)
{
    int listening = listens ? listen_at(host, send_port) : -1;
    to_coordinator = connect_to(host, port);
    from_coordinator = to_coordinator;
    if (listens)
        from_coordinator = accept(listening, NULL, NULL);
    else if (send_port)
        from_coordinator = connect_to(host, send_port);
    if (from_coordinator < 0)
        fail("the coordinator did not connect");
    if (listening >= 0)
        close(listening);
}

int main(int count, char **arguments)
{
    const char *host = "127.0.0.1", *port = NULL, *send_port = NULL;
    bool listens = false;
    for (int index = 1; index < count; index++) {
        const char *option = arguments[index], *value = index + 1 < count ? arguments[index + 1] : "";
        if (!strcmp(option, "--begin"))
            begins = true;
        else if (!strcmp(option, "--listen"))
            listens = true;
        else if (!strcmp(option, "--no-attach"))
            attached = true;
        else if (!strcmp(option, "--clock"))
            has_clock = true;
        else if (!strcmp(option, "--posts"))
            count_method = POSTED;
        else if (index++, !strcmp(option, "--peer"))
            peer_name = value;
        else if (!strcmp(option, "--count"))
            target = strtoll(value, NULL, 10);
        else if (!strcmp(option, "--flood"))
            flood_count = strtoll(value, NULL, 10);
        else if (!strcmp(option, "--host"))
            host = value;
        else if (!strcmp(option, "--port"))
            port = value;
        else if (!strcmp(option, "--send-port"))
            send_port = value;
        else
            fail("%s is no option", option);
    }
    if (!port || !*peer_name || strlen(peer_name) > NAME_SIZE_MAX || target < 1 || (listens && !send_port))
        fail("called wrongly");
    connect_all(host, port, send_port, listens);
    serve();
}
