/* A library for LD_PRELOAD: while the file that $STALL_WHILE names exists, reads and writes of data files do not end,
   as on a device that does not answer any more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

static void stall(void)
{
    const char *path = getenv("STALL_WHILE");
    while (path && access(path, F_OK) == 0)
        usleep(20000);
}

/* Python calls the variants with flags, where the C library has them. */
#define STALLING(name, parameters, arguments)                                                                          \
    ssize_t name parameters                                                                                            \
    {                                                                                                                  \
        static ssize_t(*real) parameters;                                                                              \
        if (!real)                                                                                                     \
            real = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name);                                                     \
        stall();                                                                                                       \
        return real arguments;                                                                                         \
    }
#define PLAIN (int fd, const struct iovec *parts, int count, off64_t offset)
#define FLAGS (int fd, const struct iovec *parts, int count, off64_t offset, int flags)

STALLING(preadv64, PLAIN, (fd, parts, count, offset))
STALLING(pwritev64, PLAIN, (fd, parts, count, offset))
STALLING(preadv64v2, FLAGS, (fd, parts, count, offset, flags))
STALLING(pwritev64v2, FLAGS, (fd, parts, count, offset, flags))
