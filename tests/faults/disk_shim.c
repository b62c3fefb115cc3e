/* A disk that fails on demand, preloaded before libc: for files whose path contains $DISK_SHIM_MATCH.

   $DISK_SHIM_CONTROL names a file, read at each call; without it nothing fails. Each line is
       CALL ACTION NUMBER     CALL: write, sync, read or any, or one kind of sync: data-sync, meta-sync (of data.mdb's
                              pages, and of its meta page), journal-sync, folder-sync;
                              ACTION: error ERRNO, late ERRNO, delay MILLISECONDS, kill COUNT, from OFFSET
   "late N": the call is made, and then it fails: its bytes can be read. "kill N": the process is killed right before
   the Nth such call since it was loaded. "from N": EIO for calls that touch bytes from N on. With "once" after the
   number, the first matching call removes the file.

   $DISK_SHIM_JOURNAL names a file that gets the data to undo each write, and a note of each sync: a loss of power can
   take all later writes. If it is a folder, each process has a file of its own there; their names are in the order in
   which the processes began. See tests/faults/disk.py for the format. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

enum { UNDO = 1, DONE = 2, SYNC_BEGUN = 3, SYNC_DONE = 4 };

struct entry { /* then, for UNDO, the `old` replaced bytes, and the path's `path` bytes */
    uint32_t kind, path;
    uint64_t number, offset, size, old, file_size, inode;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t last_number;
static long calls[4];

static int is_ours(int descriptor, char *path, size_t room) {
    const char *match = getenv("DISK_SHIM_MATCH");
    char link[64];
    if (!match)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, room - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return strstr(path, match) != NULL;
}

/* Return the kind of a sync. */
static const char *sync_of(int descriptor, const char *path, int own) {
    struct stat status;
    const char *name = strrchr(path, '/');
    if (!fstat(descriptor, &status) && S_ISDIR(status.st_mode))
        return "folder-sync";
    if (name && !strcmp(name, "/data.mdb"))
        return own ? "meta-sync" : "data-sync";
    return name && !strncmp(name, "/journal", 8) ? "journal-sync" : "other-sync";
}

/* Return 0; -1 with errno set, if the call fails; or the errno with which it fails after it is made. */
static int meet(const char *call, const char *kind, int index, off_t end) {
    const char *control = getenv("DISK_SHIM_CONTROL");
    char text[512], name[16], action[16], times[8];
    long number;
    calls[index]++;
    calls[3]++;
    int descriptor = control ? open(control, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor < 0)
        return 0;
    ssize_t size = REAL(read)(descriptor, text, sizeof text - 1);
    close(descriptor);
    text[size < 0 ? 0 : size] = 0;
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        int words = sscanf(line, "%15s %15s %ld %7s", name, action, &number, times);
        int any = !strcmp(name, "any");
        if (words < 3 || (!any && strcmp(name, call) && strcmp(name, kind)))
            continue;
        if (!strcmp(action, "kill") && calls[any ? 3 : index] < number)
            continue;
        if (words > 3 && !strcmp(times, "once"))
            unlink(control);
        if (!strcmp(action, "delay")) {
            struct timespec pause = {number / 1000, number % 1000 * 1000000};
            nanosleep(&pause, NULL);
        } else if (!strcmp(action, "kill")) {
            kill(getpid(), SIGKILL);
        } else if (!strcmp(action, "late")) {
            return (int)number;
        } else if (strcmp(action, "from") || end > number) {
            errno = strcmp(action, "from") ? (int)number : EIO;
            return -1;
        }
    }
    return 0;
}

/* Return the next number of a write: a process numbers its writes after those of earlier ones. */
static uint64_t next_number(void) {
    if (!last_number) {
        struct timespec now;
        syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now); /* past any library that shifts the clock */
        last_number = (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    return ++last_number;
}

static int journal(void) {
    static int descriptor = -1;
    char own[4096];
    struct stat status;
    const char *path = getenv("DISK_SHIM_JOURNAL");
    if (descriptor >= 0 || !path)
        return descriptor;
    if (!stat(path, &status) && S_ISDIR(status.st_mode)) {
        snprintf(own, sizeof own, "%s/%020lu", path, (unsigned long)next_number());
        path = own;
    }
    return descriptor = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static void note(struct entry entry, const char *path, const char *old) {
    struct iovec parts[3] = {{&entry, sizeof entry}, {(void *)old, entry.old}, {(void *)path, entry.path}};
    if (REAL(writev)(journal(), parts, 3) < 0)
        abort();
}

/* Note the bytes that this write will replace; return its number, 0 without a journal. */
static uint64_t note_write(int descriptor, const char *path, off_t offset, size_t size) {
    if (journal() < 0)
        return 0;
    struct stat status;
    fstat(descriptor, &status);
    char *old = calloc(1, size + 1);
    /* A descriptor of its own: LMDB's is for writing only. */
    int reading = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t there = reading < 0 ? 0 : REAL(pread)(reading, old, size, offset);
    if (reading >= 0)
        close(reading);
    struct entry entry = {UNDO, strlen(path), next_number(),  offset,
                          size, there < 0 ? 0 : there, status.st_size, status.st_ino};
    note(entry, path, old);
    free(old);
    return entry.number;
}

static void note_event(int kind, int descriptor, const char *path, uint64_t number) {
    struct stat status;
    if (journal() >= 0 && !fstat(descriptor, &status))
        note((struct entry){kind, strlen(path), number, 0, 0, 0, 0, status.st_ino}, path, "");
}

static int syncs_itself(int descriptor) { return (fcntl(descriptor, F_GETFL) & O_DSYNC) != 0; }

#define WRITING(path, offset, size, call)                                                                              \
    char path[4096];                                                                                                   \
    if (!is_ours(descriptor, path, sizeof path))                                                                       \
        return call;                                                                                                   \
    int late = meet("write", "", 0, (offset) + (size));                                                                \
    if (late < 0)                                                                                                      \
        return -1;                                                                                                     \
    int own = syncs_itself(descriptor);                                                                                \
    if (own && !late && (late = meet("sync", sync_of(descriptor, path, own), 1, 0)) < 0)                               \
        return -1;                                                                                                     \
    pthread_mutex_lock(&lock);                                                                                         \
    uint64_t number = note_write(descriptor, path, offset, size);                                                      \
    ssize_t result = call;                                                                                             \
    if (own && number && result >= 0 && !late)                                                                         \
        note_event(DONE, descriptor, path, number);                                                                    \
    pthread_mutex_unlock(&lock);                                                                                       \
    errno = late ? late : errno;                                                                                       \
    return late ? -1 : result

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) {
    WRITING(path, offset, size, REAL(pwrite)(descriptor, data, size, offset));
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off_t offset) {
    return pwrite(descriptor, data, size, offset);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    WRITING(path, lseek(descriptor, 0, SEEK_CUR), size, REAL(write)(descriptor, data, size));
}

static size_t total(const struct iovec *parts, int count) {
    size_t size = 0;
    for (int i = 0; i < count; i++)
        size += parts[i].iov_len;
    return size;
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    WRITING(path, lseek(descriptor, 0, SEEK_CUR), total(parts, count), REAL(writev)(descriptor, parts, count));
}

#define SYNCING(call)                                                                                                  \
    char path[4096];                                                                                                   \
    if (!is_ours(descriptor, path, sizeof path))                                                                       \
        return call;                                                                                                   \
    int late = meet("sync", sync_of(descriptor, path, 0), 1, 0);                                                       \
    if (late < 0)                                                                                                      \
        return -1;                                                                                                     \
    pthread_mutex_lock(&lock);                                                                                         \
    uint64_t upto = journal() < 0 ? 0 : next_number();                                                                 \
    pthread_mutex_unlock(&lock);                                                                                       \
    int result = call;                                                                                                 \
    if (!result && !late)                                                                                              \
        note_event(SYNC_DONE, descriptor, path, upto);                                                                 \
    errno = late ? late : errno;                                                                                       \
    return late ? -1 : result

int fdatasync(int descriptor) { SYNCING(REAL(fdatasync)(descriptor)); }

int fsync(int descriptor) { SYNCING(REAL(fsync)(descriptor)); }

#define READING(offset, call)                                                                                                  \
    char path[4096];                                                                                                   \
    if (is_ours(descriptor, path, sizeof path) && meet("read", "", 2, (offset) + size))                                \
        return -1;                                                                                                     \
    return call

ssize_t pread(int descriptor, void *data, size_t size, off_t offset) {
    READING(offset, REAL(pread)(descriptor, data, size, offset));
}

ssize_t pread64(int descriptor, void *data, size_t size, off_t offset) { return pread(descriptor, data, size, offset); }

ssize_t read(int descriptor, void *data, size_t size) { READING(lseek(descriptor, 0, SEEK_CUR), REAL(read)(descriptor, data, size)); }
