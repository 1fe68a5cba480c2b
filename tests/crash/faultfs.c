/* Storage that fails on request: interposed with LD_PRELOAD over the system calls of a real process.
 *
 * Environment:
 *   FAULTFS_ROOT     only files below this folder are touched
 *   FAULTFS_CONTROL  a file of rules, read again before each operation; its first line is a generation number, and a new
 *                    one starts every count afresh
 *   FAULTFS_LOG      each operation is appended to this file: "<pid> <operation> <result or -errno> <path>"
 *
 * A rule is one line: <operation> <action> <value> <times> <after> <path>
 *   operation  open write fsync close rename unlink mkdir, or any
 *   action     error V    fail with errno V
 *              short V    take only V bytes of a write (0 too)
 *              hang V     wait V ms, or until a new generation comes, and then follow its rules
 *              kill V     SIGKILL this process before the operation
 *              tear V     write V bytes, then SIGKILL
 *              flip V     write all, but byte V with its bits inverted
 *   times      how many operations it meets; 0: every one
 *   after      how many it lets pass first
 *   path       a part of the path; its end, when a $ follows; * for any
 *
 * The library's own files are reached through syscall(), so that it never meets itself. One lock orders rules and counts
 * of a process; it is not held while an operation hangs. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RULES 16

struct rule {
    char operation[16], action[16], path[256];
    long value, times, after;
    long seen;
};

static struct rule rules[RULES];
static int rule_count;
static char generation[32];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void take_lock(void) { pthread_mutex_lock(&lock); }
static void give_lock(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(take_lock, give_lock, give_lock); }

static const char *root(void) {
    static const char *value;
    if (!value) {
        value = getenv("FAULTFS_ROOT");
        if (!value) value = "";
    }
    return value;
}

static int below_root(const char *path) {
    size_t length = strlen(root());
    return length && !strncmp(path, root(), length) && (path[length] == '/' || !path[length]);
}

static int path_of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlink, link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below_root(path);
}

static int path_at(int folder, const char *name, char *path) {
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else if (folder == AT_FDCWD) {
        if (syscall(SYS_getcwd, path, PATH_MAX) < 0) return 0;
        size_t length = strlen(path);
        snprintf(path + length, PATH_MAX - length, "/%s", name);
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = syscall(SYS_readlink, link, path, PATH_MAX - 1);
        if (length < 0) return 0;
        snprintf(path + length, PATH_MAX - length, "/%s", name);
    }
    return below_root(path);
}

static void record(const char *operation, long result, const char *path) {
    const char *log = getenv("FAULTFS_LOG");
    if (!log) return;
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%d %s %ld %s\n", (int)getpid(), operation, result, path);
    long fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) return;
    syscall(SYS_write, (int)fd, line, (size_t)length);
    syscall(SYS_close, (int)fd);
}

/* With the lock held. */
static void read_rules(void) {
    const char *control = getenv("FAULTFS_CONTROL");
    char text[8192];
    long fd = control ? syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC, 0) : -1;
    long length = fd < 0 ? 0 : syscall(SYS_read, (int)fd, text, sizeof text - 1);
    if (fd >= 0) syscall(SYS_close, (int)fd);
    if (length < 0) length = 0;
    text[length] = 0;
    char *rest = text, *line = strsep(&rest, "\n");
    if (!line || !strcmp(line, generation)) return;
    snprintf(generation, sizeof generation, "%s", line);
    rule_count = 0;
    while (rule_count < RULES && (line = strsep(&rest, "\n"))) {
        struct rule *rule = &rules[rule_count];
        memset(rule, 0, sizeof *rule);
        if (sscanf(line, "%15s %15s %ld %ld %ld %255s", rule->operation, rule->action, &rule->value, &rule->times,
                   &rule->after, rule->path) == 6)
            rule_count++;
    }
}

static int concerns(const struct rule *rule, const char *path) {
    size_t length = strlen(rule->path), whole = strlen(path);
    if (!strcmp(rule->path, "*")) return 1;
    if (rule->path[length - 1] != '$') return strstr(path, rule->path) != NULL;
    return whole >= length - 1 && !strncmp(path + whole - (length - 1), rule->path, length - 1);
}

/* Return the rule that this operation meets, or NULL; a hang is waited for here. */
static const struct rule *meet(const char *operation, const char *path) {
    static __thread struct rule met;
    int found = 0;
    char began[sizeof generation];
    pthread_mutex_lock(&lock);
    read_rules();
    memcpy(began, generation, sizeof began);
    for (int i = 0; i < rule_count && !found; i++) {
        struct rule *rule = &rules[i];
        if (strcmp(rule->operation, "any") && strcmp(rule->operation, operation)) continue;
        if (!concerns(rule, path)) continue;
        rule->seen++;
        if (rule->seen <= rule->after || (rule->times && rule->seen > rule->after + rule->times)) continue;
        met = *rule;
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    if (!found) return NULL;
    if (!strcmp(met.action, "kill")) kill(getpid(), SIGKILL);
    if (!strcmp(met.action, "hang")) {
        record("hanging", met.value, path);
        for (long waited = 0; waited < met.value; waited++) {
            struct timespec ms = {0, 1000000};
            nanosleep(&ms, NULL);
            pthread_mutex_lock(&lock);
            read_rules();
            int changed = memcmp(began, generation, sizeof began);
            pthread_mutex_unlock(&lock);
            if (changed) return meet(operation, path);
        }
        return NULL;
    }
    return &met;
}

/* Return whether the operation fails, with errno set. */
static int fails(const char *operation, const char *path) {
    const struct rule *rule = meet(operation, path);
    if (!rule || strcmp(rule->action, "error")) return 0;
    record(operation, -rule->value, path);
    errno = (int)rule->value;
    return 1;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define FINISH(operation, call, path) \
    do { \
        long result = (call); \
        int error = errno; \
        record(operation, result < 0 ? -(long)error : result, path); \
        errno = error; \
        return result; \
    } while (0)

#define OPEN(name, at_folder, at_name, call, ...) \
    int name(__VA_ARGS__, ...) { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list arguments; \
            va_start(arguments, flags); \
            mode = va_arg(arguments, mode_t); \
            va_end(arguments); \
        } \
        char path[PATH_MAX]; \
        if (!path_at(at_folder, at_name, path)) return call; \
        if (fails("open", path)) return -1; \
        FINISH("open", call, path); \
    }

OPEN(open, AT_FDCWD, file, real(file, flags, mode), const char *file, int flags)
OPEN(open64, AT_FDCWD, file, real(file, flags, mode), const char *file, int flags)
OPEN(openat, folder, file, real(folder, file, flags, mode), int folder, const char *file, int flags)
OPEN(openat64, folder, file, real(folder, file, flags, mode), int folder, const char *file, int flags)

#define WRITE(name, call, ...) \
    ssize_t name(__VA_ARGS__) { \
        REAL(name); \
        char path[PATH_MAX]; \
        if (!path_of_fd(fd, path)) return call; \
        const struct rule *rule = meet("write", path); \
        if (rule && !strcmp(rule->action, "error")) { \
            record("write", -rule->value, path); \
            errno = (int)rule->value; \
            return -1; \
        } \
        char *flipped = NULL; \
        if (rule && !strcmp(rule->action, "flip") && (size_t)rule->value < size && (flipped = malloc(size))) { \
            memcpy(flipped, data, size); \
            flipped[rule->value] = (char)~flipped[rule->value]; \
            data = flipped; \
        } \
        if (rule && (!strcmp(rule->action, "short") || !strcmp(rule->action, "tear"))) { \
            if ((size_t)rule->value < size) size = (size_t)rule->value; \
            ssize_t taken = size ? call : 0; \
            if (!strcmp(rule->action, "tear")) kill(getpid(), SIGKILL); \
            record("write", taken, path); \
            return taken; \
        } \
        ssize_t written = call; \
        int error = errno; \
        free(flipped); \
        record("write", written < 0 ? -(long)error : written, path); \
        errno = error; \
        return written; \
    }

WRITE(write, real(fd, data, size), int fd, const void *data, size_t size)
WRITE(pwrite, real(fd, data, size, offset), int fd, const void *data, size_t size, off_t offset)
WRITE(pwrite64, real(fd, data, size, offset), int fd, const void *data, size_t size, off64_t offset)

#define BY_FD(name, operation, call, ...) \
    int name(__VA_ARGS__) { \
        REAL(name); \
        char path[PATH_MAX]; \
        if (!path_of_fd(fd, path)) return call; \
        if (fails(operation, path)) return -1; \
        FINISH(operation, call, path); \
    }

/* What was written before "syncing" was recorded is durable once "fsync" is. */
BY_FD(fsync, "fsync", (record("syncing", fd, path), real(fd)), int fd)
BY_FD(fdatasync, "fsync", (record("syncing", fd, path), real(fd)), int fd)

int close(int fd) {
    REAL(close);
    char path[PATH_MAX];
    if (!path_of_fd(fd, path)) return real(fd);
    if (fails("close", path)) { /* as Linux does: the descriptor is gone, whatever close says */
        int error = errno;
        real(fd);
        errno = error;
        return -1;
    }
    FINISH("close", real(fd), path);
}

#define BY_NAME(name, operation, at_folder, call, ...) \
    int name(__VA_ARGS__) { \
        REAL(name); \
        char path[PATH_MAX]; \
        if (!path_at(at_folder, file, path)) return call; \
        if (fails(operation, path)) return -1; \
        FINISH(operation, call, path); \
    }

BY_NAME(rename, "rename", AT_FDCWD, real(file, to), const char *file, const char *to)
BY_NAME(renameat, "rename", folder, real(folder, file, to_folder, to), int folder, const char *file, int to_folder,
        const char *to)
BY_NAME(unlink, "unlink", AT_FDCWD, real(file), const char *file)
BY_NAME(unlinkat, "unlink", folder, real(folder, file, flags), int folder, const char *file, int flags)
BY_NAME(mkdir, "mkdir", AT_FDCWD, real(file, mode), const char *file, mode_t mode)
BY_NAME(mkdirat, "mkdir", folder, real(folder, file, mode), int folder, const char *file, mode_t mode)
BY_NAME(truncate, "truncate", AT_FDCWD, real(file, size), const char *file, off_t size)
BY_NAME(truncate64, "truncate", AT_FDCWD, real(file, size), const char *file, off64_t size)

BY_FD(ftruncate, "truncate", real(fd, size), int fd, off_t size)
BY_FD(ftruncate64, "truncate", real(fd, size), int fd, off64_t size)
BY_FD(flock, "lock", real(fd, operation), int fd, int operation)
BY_FD(lockf, "lock", real(fd, command, size), int fd, int command, off_t size)
BY_FD(lockf64, "lock", real(fd, command, size), int fd, int command, off64_t size)

#define FCNTL(name) \
    int name(int fd, int command, ...) { \
        REAL(name); \
        va_list arguments; \
        va_start(arguments, command); \
        void *argument = va_arg(arguments, void *); \
        va_end(arguments); \
        char path[PATH_MAX]; \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW; \
        if (!locks || !path_of_fd(fd, path)) return real(fd, command, argument); \
        FINISH("lock", real(fd, command, argument), path); \
    }

FCNTL(fcntl)
FCNTL(fcntl64)

#define MMAP(name, kind) \
    void *name(void *start, size_t size, int protection, int flags, int fd, kind offset) { \
        REAL(name); \
        char path[PATH_MAX]; \
        if (fd >= 0 && path_of_fd(fd, path)) record("mmap", 0, path); \
        return real(start, size, protection, flags, fd, offset); \
    }

MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

/* Of any process: nothing here may know of a network. */
int socket(int family, int type, int protocol) {
    REAL(socket);
    if (family != AF_UNIX) record("socket", family, "-");
    return real(family, type, protocol);
}
