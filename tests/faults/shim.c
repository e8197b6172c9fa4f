/* Stands between a process and the kernel, by LD_PRELOAD, for what is done to the regular files below one directory.
 *
 * Keeps an undo log of every change and of every sync, so that tests.faults.power_loss can take back what no sync
 * covered; kills the process at a chosen call; makes a chosen call fail. Watches nothing until shim_configure is called.
 *
 * The log is a sequence of records in the machine's byte order: struct record, then data_length bytes. It is written with
 * plain write(), so it survives the process. SQLite's "-shm" files are left alone: nobody reads them after a crash.
 * Changes through mmap, io_uring, sendfile and copy_file_range are not seen.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define SECTOR 512
#define EXPORT __attribute__((visibility("default")))

/* What a record says. */
enum { WRITE = 1, RESIZE, END, SYNC_BEGIN, SYNC_END, CREATE, UNLINK, KILL, FAIL };
/* What was called. */
enum { CALL_WRITE = 1, CALL_SYNC, CALL_TRUNCATE, CALL_GROW, CALL_CREATE, CALL_UNLINK };

struct record {
    uint32_t kind;
    uint32_t call_kind;
    uint64_t id;          /* of the operation; END and SYNC_END repeat that of their beginning */
    uint64_t call;        /* number of the call in this process, from 1 */
    uint64_t inode;       /* of the file */
    uint64_t offset;      /* WRITE: where; RESIZE: the new size; CREATE: inode of the directory */
    uint64_t length;      /* WRITE: how much; END, SYNC_END: 1 if it failed, else 0 */
    uint64_t old_size;    /* WRITE, RESIZE: size of the file before */
    uint64_t data_length; /* WRITE: the old bytes; RESIZE: those cut off; CREATE, KILL, FAIL: the file's name */
};

struct target {
    uint64_t inode;
    uint64_t size;
    int is_directory;
    char path[PATH_MAX];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char directory[PATH_MAX];
static size_t directory_length; /* 0: nothing is watched */
static int log_fd = -1;
static uint64_t operations;
static long calls;                /* watched ones since shim_configure */
static long matching;             /* those of them that the orders count */
static long kill_call, fail_call; /* 0: none */
static int kill_permille, fail_error, fail_sticky;
static char match_name[NAME_MAX + 1];
static int match_kind;
static int torn_now; /* the write under way is the one to be torn */

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL)
        abort();
    return found;
}

static ssize_t (*real_write)(int, const void *, size_t);
static int (*real_open_at)(int, const char *, int, ...);

__attribute__((constructor)) static void begin(void)
{
    real_write = REAL(write);
    real_open_at = (int (*)(int, const char *, int, ...))real("openat64");
}

static int ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), n = strlen(end);
    return length >= n && strcmp(text + length - n, end) == 0;
}

/* Whether an open descriptor is of something that is watched. Leaves errno alone. */
static int is_watched(int fd, struct target *target)
{
    if (directory_length == 0)
        return 0;
    int saved = errno, watched = 0;
    struct stat status;
    if (fstat(fd, &status) == 0 && (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, target->path, sizeof target->path - 1);
        if (length > 0) {
            target->path[length] = 0;
            target->inode = status.st_ino;
            target->size = status.st_size;
            target->is_directory = S_ISDIR(status.st_mode);
            char after = target->path[directory_length < (size_t)length ? directory_length : (size_t)length];
            watched = strncmp(target->path, directory, directory_length) == 0 && (after == '/' || after == 0) &&
                      !ends_with(target->path, "-shm");
        }
    }
    errno = saved;
    return watched;
}

/* All of these are called with the mutex held. */

static void append(struct record *record, const void *data, size_t data_length)
{
    record->data_length = data_length;
    struct iovec parts[2] = {{record, sizeof *record}, {(void *)data, data_length}};
    for (int i = 0; i < 2; i++) {
        const char *at = parts[i].iov_base;
        for (size_t left = parts[i].iov_len; left > 0;) {
            ssize_t written = real_write(log_fd, at, left);
            if (written < 0) {
                if (errno == EINTR)
                    continue;
                perror("shim: the undo log cannot be written");
                abort();
            }
            at += written;
            left -= written;
        }
    }
}

static const char *name_of(const struct target *target)
{
    const char *slash = strrchr(target->path, '/');
    return slash ? slash + 1 : target->path;
}

static void append_event(int kind, int call_kind, const struct target *target)
{
    struct record record = {.kind = kind, .call_kind = call_kind, .call = calls, .inode = target->inode};
    append(&record, name_of(target), strlen(name_of(target)));
}

static void die(int call_kind, const struct target *target)
{
    append_event(KILL, call_kind, target);
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Counts a call, and does what was ordered for it. Returns the error that it must fail with, 0 for none. */
static int enter(int call_kind, const struct target *target)
{
    calls++;
    torn_now = 0;
    if (strncmp(name_of(target), match_name, strlen(match_name)) != 0 || (match_kind && match_kind != call_kind))
        return 0;
    matching++;
    if (matching == kill_call) {
        torn_now = call_kind == CALL_WRITE && kill_permille;
        if (!torn_now)
            die(call_kind, target);
    }
    if (fail_call && (matching == fail_call || (fail_sticky && matching > fail_call))) {
        append_event(FAIL, call_kind, target);
        return fail_error;
    }
    return 0;
}

static uint64_t next_id(void)
{
    return ((uint64_t)getpid() << 32) | ++operations;
}

/* A descriptor of our own, which knows no O_DIRECT. */
static int reopen(int fd, int flags)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int own = real_open_at(AT_FDCWD, link, flags | O_CLOEXEC);
    if (own < 0) {
        perror("shim: a watched file cannot be opened again");
        abort();
    }
    posix_fadvise(own, 0, 0, POSIX_FADV_RANDOM);
    return own;
}

static char *old_bytes(int fd, uint64_t offset, uint64_t length, uint64_t size, size_t *found)
{
    *found = 0;
    if (offset >= size || length == 0)
        return NULL;
    if (offset + length > size)
        length = size - offset;
    char *bytes = malloc(length);
    if (bytes == NULL)
        abort();
    /* Closing a descriptor ends this process's POSIX locks on the file: SQLite's own one is used where it can be. */
    int flags = fcntl(fd, F_GETFL), own = -1;
    if ((flags & O_DIRECT) || (flags & O_ACCMODE) != O_RDWR)
        own = reopen(fd, O_RDONLY);
    while (*found < length) {
        ssize_t count = pread64(own < 0 ? fd : own, bytes + *found, length - *found, offset + *found);
        if (count <= 0)
            break;
        *found += count;
    }
    if (own >= 0)
        close(own);
    return bytes;
}

static void append_undo(
    int kind, int call_kind, uint64_t id, int fd, const struct target *target, uint64_t offset, uint64_t length,
    uint64_t keep_from, uint64_t keep_length)
{
    size_t found;
    char *bytes = old_bytes(fd, keep_from, keep_length, target->size, &found);
    struct record record = {
        .kind = kind, .call_kind = call_kind, .id = id, .call = calls, .inode = target->inode,
        .offset = offset, .length = length, .old_size = target->size};
    append(&record, bytes, found);
    free(bytes);
}

/* Takes the mutex. */
static void append_end(int kind, uint64_t id, uint64_t inode, int failed)
{
    int saved = errno;
    pthread_mutex_lock(&mutex);
    struct record record = {.kind = kind, .id = id, .inode = inode, .length = failed};
    append(&record, NULL, 0);
    pthread_mutex_unlock(&mutex);
    errno = saved;
}

/* Writes the first sectors of what was asked for, then ends the process. */
static void tear(int fd, const struct iovec *parts, int count, uint64_t offset, uint64_t length,
                 const struct target *target)
{
    uint64_t left = (length / SECTOR * kill_permille / 1000) * SECTOR;
    int own = reopen(fd, O_WRONLY);
    for (int i = 0; i < count && left > 0; i++) {
        size_t part = parts[i].iov_len < left ? parts[i].iov_len : left;
        ssize_t written = (REAL(pwrite64))(own, parts[i].iov_base, part, offset);
        if (written < 0)
            break;
        offset += written;
        left -= written;
    }
    die(CALL_WRITE, target);
}

/* What every write does before it is let through: 0 if it may pass, else the error. */
static int before_write(int fd, const struct iovec *parts, int count, int64_t offset, uint64_t *id, uint64_t *inode)
{
    struct target target;
    *id = 0;
    if (!is_watched(fd, &target))
        return 0;
    pthread_mutex_lock(&mutex);
    int error = enter(CALL_WRITE, &target);
    if (error == 0) {
        /* Asked again: another thread may have made the file longer. */
        struct stat status;
        if (fstat(fd, &status) == 0)
            target.size = status.st_size;
        if (fcntl(fd, F_GETFL) & O_APPEND)
            offset = target.size;
        else if (offset < 0)
            offset = lseek64(fd, 0, SEEK_CUR);
        uint64_t length = 0;
        for (int i = 0; i < count; i++)
            length += parts[i].iov_len;
        *id = next_id();
        *inode = target.inode;
        append_undo(WRITE, CALL_WRITE, *id, fd, &target, offset, length, offset, length);
        if (torn_now)
            tear(fd, parts, count, offset, length, &target);
    }
    pthread_mutex_unlock(&mutex);
    return error;
}

#define AROUND_WRITE(parts, count, offset, call)                                                                        \
    do {                                                                                                               \
        uint64_t id, inode;                                                                                            \
        int error = before_write(fd, parts, count, offset, &id, &inode);                                               \
        if (error) {                                                                                                   \
            errno = error;                                                                                             \
            return -1;                                                                                                 \
        }                                                                                                              \
        ssize_t result = call;                                                                                         \
        if (id)                                                                                                        \
            append_end(END, id, inode, result < 0);                                                                    \
        return result;                                                                                                 \
    } while (0)

EXPORT ssize_t write(int fd, const void *buffer, size_t length)
{
    if (directory_length == 0)
        return (real_write ? real_write : REAL(write))(fd, buffer, length);
    struct iovec part = {(void *)buffer, length};
    AROUND_WRITE(&part, 1, -1, real_write(fd, buffer, length));
}

EXPORT ssize_t pwrite64(int fd, const void *buffer, size_t length, off64_t offset)
{
    struct iovec part = {(void *)buffer, length};
    AROUND_WRITE(&part, 1, offset, REAL(pwrite64)(fd, buffer, length, offset));
}

EXPORT ssize_t pwrite(int fd, const void *buffer, size_t length, off_t offset)
{
    return pwrite64(fd, buffer, length, offset);
}

EXPORT ssize_t writev(int fd, const struct iovec *parts, int count)
{
    AROUND_WRITE(parts, count, -1, REAL(writev)(fd, parts, count));
}

EXPORT ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset)
{
    AROUND_WRITE(parts, count, offset, REAL(pwritev64)(fd, parts, count, offset));
}

EXPORT ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    return pwritev64(fd, parts, count, offset);
}

EXPORT ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
    AROUND_WRITE(parts, count, offset, REAL(pwritev64v2)(fd, parts, count, offset, flags));
}

EXPORT ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    return pwritev64v2(fd, parts, count, offset, flags);
}

/* The same for what changes a size; [cut_from, cut_from + cut_length) are the bytes that go. */
static int before_resize(int call_kind, int fd, uint64_t new_size, int may_shrink, uint64_t *id, uint64_t *inode)
{
    struct target target;
    *id = 0;
    if (!is_watched(fd, &target))
        return 0;
    pthread_mutex_lock(&mutex);
    int error = enter(call_kind, &target);
    if (error == 0) {
        uint64_t size = may_shrink || new_size > target.size ? new_size : target.size;
        *id = next_id();
        *inode = target.inode;
        append_undo(RESIZE, call_kind, *id, fd, &target, size, 0, size, target.size > size ? target.size - size : 0);
    }
    pthread_mutex_unlock(&mutex);
    return error;
}

EXPORT int ftruncate64(int fd, off64_t size)
{
    uint64_t id, inode;
    int error = before_resize(CALL_TRUNCATE, fd, size, 1, &id, &inode);
    if (error) {
        errno = error;
        return -1;
    }
    int result = REAL(ftruncate64)(fd, size);
    if (id)
        append_end(END, id, inode, result < 0);
    return result;
}

EXPORT int ftruncate(int fd, off_t size)
{
    return ftruncate64(fd, size);
}

EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t length)
{
    uint64_t id, inode;
    int error = before_resize(CALL_GROW, fd, offset + length, 0, &id, &inode);
    if (error)
        return error;
    int result = REAL(posix_fallocate64)(fd, offset, length);
    if (id)
        append_end(END, id, inode, result != 0);
    return result;
}

EXPORT int posix_fallocate(int fd, off_t offset, off_t length)
{
    return posix_fallocate64(fd, offset, length);
}

static int before_punch(int fd, uint64_t offset, uint64_t length, uint64_t *id, uint64_t *inode)
{
    struct target target;
    *id = 0;
    if (!is_watched(fd, &target))
        return 0;
    pthread_mutex_lock(&mutex);
    int error = enter(CALL_WRITE, &target);
    if (error == 0) {
        *id = next_id();
        *inode = target.inode;
        append_undo(WRITE, CALL_WRITE, *id, fd, &target, offset, length, offset, length);
    }
    pthread_mutex_unlock(&mutex);
    return error;
}

EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t length)
{
    uint64_t id, inode;
    int error;
    if (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE))
        error = before_punch(fd, offset, length, &id, &inode);
    else
        error = before_resize(CALL_GROW, fd, mode & FALLOC_FL_KEEP_SIZE ? 0 : offset + length, 0, &id, &inode);
    if (error) {
        errno = error;
        return -1;
    }
    int result = REAL(fallocate64)(fd, mode, offset, length);
    if (id)
        append_end(END, id, inode, result < 0);
    return result;
}

EXPORT int fallocate(int fd, int mode, off_t offset, off_t length)
{
    return fallocate64(fd, mode, offset, length);
}

static int synced(int fd, int (*sync)(int))
{
    struct target target;
    if (!is_watched(fd, &target))
        return sync(fd);
    pthread_mutex_lock(&mutex);
    int error = enter(CALL_SYNC, &target);
    uint64_t id = next_id();
    struct record record = {
        .kind = SYNC_BEGIN, .call_kind = CALL_SYNC, .id = id, .call = calls, .inode = target.inode};
    append(&record, NULL, 0);
    pthread_mutex_unlock(&mutex);
    int result = error ? -1 : sync(fd);
    append_end(SYNC_END, id, target.inode, result < 0);
    if (error)
        errno = error;
    return result;
}

EXPORT int fsync(int fd)
{
    return synced(fd, REAL(fsync));
}

EXPORT int fdatasync(int fd)
{
    return synced(fd, REAL(fdatasync));
}

/* A name that is not there yet and is about to be created: 1, with what is known of it. */
static int is_new(int at, const char *path, int flags, struct target *target)
{
    if (directory_length == 0 || !(flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE || ends_with(path, "-shm"))
        return 0;
    int saved = errno, is = 0;
    struct stat status;
    char parent[PATH_MAX];
    const char *slash = strrchr(path, '/');
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    if (fstatat(at, path, &status, 0) != 0 && errno == ENOENT) {
        int fd = real_open_at(at, *parent ? parent : "/", O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (fd >= 0) {
            is = is_watched(fd, target);
            snprintf(target->path, sizeof target->path, "%s", path);
            close(fd);
        }
    }
    errno = saved;
    return is;
}

static int opened(int at, const char *path, int flags, mode_t mode)
{
    struct target parent;
    if (real_open_at == NULL)
        begin();
    if (!is_new(at, path, flags, &parent))
        return real_open_at(at, path, flags, mode);
    pthread_mutex_lock(&mutex);
    int fd = -1, error = enter(CALL_CREATE, &parent);
    if (error) {
        errno = error;
    } else if ((fd = real_open_at(at, path, flags, mode)) >= 0) {
        struct stat status;
        fstat(fd, &status);
        struct record record = {
            .kind = CREATE, .call_kind = CALL_CREATE, .id = next_id(), .call = calls, .inode = status.st_ino,
            .offset = parent.inode};
        append(&record, name_of(&parent), strlen(name_of(&parent)));
    }
    int saved = errno;
    pthread_mutex_unlock(&mutex);
    errno = saved;
    return fd;
}

#define MODE(flags)                                                                                                    \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                                                                           \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }

EXPORT int open(const char *path, int flags, ...)
{
    MODE(flags)
    return opened(AT_FDCWD, path, flags, mode);
}

EXPORT int open64(const char *path, int flags, ...)
{
    MODE(flags)
    return opened(AT_FDCWD, path, flags, mode);
}

EXPORT int openat(int at, const char *path, int flags, ...)
{
    MODE(flags)
    return opened(at, path, flags, mode);
}

EXPORT int openat64(int at, const char *path, int flags, ...)
{
    MODE(flags)
    return opened(at, path, flags, mode);
}

static int unlinked(int at, const char *path, int flags)
{
    int (*unlink_at)(int, const char *, int) = REAL(unlinkat);
    struct target target;
    int fd = -1, saved = errno;
    if (directory_length != 0 && !(flags & AT_REMOVEDIR))
        fd = real_open_at(at, path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    int watched = fd >= 0 && is_watched(fd, &target);
    if (fd >= 0)
        close(fd);
    errno = saved;
    if (!watched)
        return unlink_at(at, path, flags);
    pthread_mutex_lock(&mutex);
    int result = -1, error = enter(CALL_UNLINK, &target);
    if (error) {
        saved = error;
    } else {
        result = unlink_at(at, path, flags);
        saved = errno;
        if (result == 0)
            append_event(UNLINK, CALL_UNLINK, &target);
    }
    pthread_mutex_unlock(&mutex);
    errno = saved;
    return result;
}

EXPORT int unlink(const char *path)
{
    return unlinked(AT_FDCWD, path, 0);
}

EXPORT int unlinkat(int at, const char *path, int flags)
{
    return unlinked(at, path, flags);
}

/* Watches the files below a directory (an absolute path without links) from now on; 0, or an errno. */
EXPORT int shim_configure(const char *watched, const char *log_path)
{
    int fd = real_open_at(AT_FDCWD, log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    pthread_mutex_lock(&mutex);
    if (log_fd >= 0)
        close(log_fd);
    log_fd = fd;
    calls = matching = kill_call = fail_call = 0;
    snprintf(directory, sizeof directory, "%s", watched);
    directory_length = strlen(directory);
    pthread_mutex_unlock(&mutex);
    return 0;
}

/* Makes the orders below count only calls of a kind (0: any) on files whose names begin so. */
EXPORT void shim_match(const char *name, int call_kind)
{
    pthread_mutex_lock(&mutex);
    snprintf(match_name, sizeof match_name, "%s", name);
    match_kind = call_kind;
    pthread_mutex_unlock(&mutex);
}

/* Ends the process at the n-th call from now, before it; a write after the first `torn` thousandths of its sectors.
 * n = 0: not any more. */
EXPORT void shim_kill_at(long n, int torn)
{
    pthread_mutex_lock(&mutex);
    kill_call = n ? matching + n : 0;
    kill_permille = torn;
    pthread_mutex_unlock(&mutex);
}

/* Makes the n-th call from now fail with an errno, and all later ones if `sticky`. n = 0: none any more. */
EXPORT void shim_fail_at(long n, int error, int sticky)
{
    pthread_mutex_lock(&mutex);
    fail_call = n ? matching + n : 0;
    fail_error = error;
    fail_sticky = sticky;
    pthread_mutex_unlock(&mutex);
}

/* How many watched calls there were since shim_configure. */
EXPORT long shim_calls(void)
{
    pthread_mutex_lock(&mutex);
    long n = calls;
    pthread_mutex_unlock(&mutex);
    return n;
}
