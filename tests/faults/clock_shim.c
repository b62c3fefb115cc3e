/* A clock that jumps on demand, preloaded before libc: a process reads CLOCK_REALTIME with a shift.

   $CLOCK_SHIM_CONTROL names a file of 8 bytes, a signed number in the machine's byte order: the shift in ns. It is
   mapped when the clock is first read, so a jump is one write to the file, at once and for all processes that share
   it. Without the file, the clock is right. CLOCK_MONOTONIC and CLOCK_BOOTTIME do not change, as with settimeofday;
   times of files do not change either.

   From a shell:   cc -O1 -shared -fPIC -o clock_shim.so tests/faults/clock_shim.c -ldl
                   python -c "import struct; open('shift', 'wb').write(struct.pack('=q', 0))"
                   LD_PRELOAD=./clock_shim.so CLOCK_SHIM_CONTROL=shift immortal run ...
   From Python:    clock = tests.faults.clock.ShiftedClock(folder)
                   subprocess.Popen(..., env=os.environ | clock.environment)
                   clock.jump(timedelta(hours=1)); ...; clock.jump(timedelta(0))      how far it is ahead from now on
   Both shims:     LD_PRELOAD takes several libraries, with a colon between them. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *control;

static int64_t shift_ns(void) {
    const char *path;
    if (!control && (path = getenv("CLOCK_SHIM_CONTROL"))) {
        int descriptor = open(path, O_RDONLY | O_CLOEXEC);
        if (descriptor >= 0) {
            void *map = mmap(NULL, 8, PROT_READ, MAP_SHARED, descriptor, 0);
            close(descriptor);
            if (map != MAP_FAILED)
                control = map;
        }
    }
    return control ? *control : 0;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, time);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t now_ns = time->tv_sec * 1000000000LL + time->tv_nsec + shift_ns();
        time->tv_sec = now_ns / 1000000000;
        time->tv_nsec = now_ns % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return -1;
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
