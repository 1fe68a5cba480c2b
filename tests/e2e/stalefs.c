/* A network file system as one host sees what another one writes: interposed with LD_PRELOAD over a process that reads.
 *
 * Environment:
 *   STALEFS_ROOT      only what lies below this folder is touched
 *   STALEFS_CACHE_MS  for so long attributes, listings, and that a file is not there, are as they were first seen
 *   STALEFS_SLOW_MS   each look at a name takes so long
 *   STALEFS_FAIL      of so many looks one fails, with EIO, ESTALE or ENOENT; 0: none
 *   STALEFS_CLOCK_S   this host's clock is so many seconds before that of others; may be negative
 *
 * An open file is read as it is, as NFS promises: opening asks the server. A name that was just seen not to be there
 * cannot be opened, though it is there by now. Nothing is freed: a test is over in a minute. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

struct listing {
    int count;
    struct dirent64 *entries;
};

struct known {
    struct known *next;
    char *path;
    long stat_ms, list_ms; /* when it was seen; 0: never */
    struct stat stat;
    int error;
    struct listing listing;
};

static struct known *all[4096];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned looks;

static long setting(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static long now_ms(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int is_below(const char *path) {
    const char *root = getenv("STALEFS_ROOT");
    size_t length = root ? strlen(root) : 0;
    return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int path_at(int folder, const char *name, char *path) {
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        char link[64];
        ssize_t length;
        if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = syscall(SYS_readlink, link, path, PATH_MAX - 1);
        if (length < 0) return 0;
        snprintf(path + length, PATH_MAX - length, name[0] ? "/%s" : "%s", name);
    }
    return is_below(path);
}

/* With the lock held. */
static struct known *known_of(const char *path) {
    unsigned long hash = 5381;
    for (const char *at = path; *at; at++) hash = hash * 33 + (unsigned char)*at;
    struct known **place = &all[hash % 4096];
    for (struct known *one = *place; one; one = one->next)
        if (!strcmp(one->path, path)) return one;
    struct known *one = calloc(1, sizeof *one);
    one->path = strdup(path);
    one->next = *place;
    return *place = one;
}

static int is_fresh(long since_ms) { return since_ms && now_ms() - since_ms < setting("STALEFS_CACHE_MS"); }

/* Takes its time, and returns whether this look fails, with errno set. */
static int fails(void) {
    static const int errors[] = {EIO, ESTALE, ENOENT};
    long slow_ms = setting("STALEFS_SLOW_MS"), of = setting("STALEFS_FAIL");
    if (slow_ms) usleep((useconds_t)(slow_ms * 1000));
    if (!of) return 0;
    unsigned number = __atomic_add_fetch(&looks, 1, __ATOMIC_RELAXED) * 2654435761u >> 8; /* scattered, not random */
    if (number % of) return 0;
    errno = errors[number / of % 3];
    return 1;
}

static int look(const char *path, struct stat *found, int flags) {
    if (fails()) return -1;
    pthread_mutex_lock(&lock);
    struct known *one = known_of(path);
    if (!is_fresh(one->stat_ms)) {
        one->error = syscall(SYS_newfstatat, AT_FDCWD, path, &one->stat, flags) ? errno : 0;
        one->stat_ms = now_ms();
    }
    int error = one->error;
    *found = one->stat;
    pthread_mutex_unlock(&lock);
    errno = error;
    return error ? -1 : 0;
}

#define STAT(name, type, at_folder, real_call, look_flags, ...) \
    int name(__VA_ARGS__) { \
        REAL(name); \
        char path[PATH_MAX]; \
        if (!path_at(at_folder, file, path)) return real_call; \
        return look(path, (struct stat *)found, look_flags); \
    }

STAT(stat, stat, AT_FDCWD, real(file, found), 0, const char *file, struct stat *found)
STAT(stat64, stat64, AT_FDCWD, real(file, found), 0, const char *file, struct stat64 *found)
STAT(lstat, stat, AT_FDCWD, real(file, found), AT_SYMLINK_NOFOLLOW, const char *file, struct stat *found)
STAT(lstat64, stat64, AT_FDCWD, real(file, found), AT_SYMLINK_NOFOLLOW, const char *file, struct stat64 *found)
STAT(fstatat, stat, folder, real(folder, file, found, flags), flags & AT_SYMLINK_NOFOLLOW, int folder, const char *file,
     struct stat *found, int flags)
STAT(fstatat64, stat64, folder, real(folder, file, found, flags), flags & AT_SYMLINK_NOFOLLOW, int folder,
     const char *file, struct stat64 *found, int flags)

#define OPEN(name, at_folder, real_call, ...) \
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
        if (!path_at(at_folder, file, path) || flags & O_CREAT) return real_call; \
        if (fails()) return -1; \
        pthread_mutex_lock(&lock); \
        struct known *one = known_of(path); \
        int is_gone = one->error == ENOENT && is_fresh(one->stat_ms); \
        if (!is_gone) one->stat_ms = 0; /* opening asks for attributes anew */ \
        pthread_mutex_unlock(&lock); \
        if (!is_gone) return real_call; \
        errno = ENOENT; \
        return -1; \
    }

OPEN(open, AT_FDCWD, real(file, flags, mode), const char *file, int flags)
OPEN(open64, AT_FDCWD, real(file, flags, mode), const char *file, int flags)
OPEN(openat, folder, real(folder, file, flags, mode), int folder, const char *file, int flags)
OPEN(openat64, folder, real(folder, file, flags, mode), int folder, const char *file, int flags)

/* Folders that are being listed: which listing, and how far. */
static struct { DIR *dir; struct listing listing; int next; } walks[256];

static struct dirent64 *(*real_readdir)(DIR *);

DIR *opendir(const char *file) {
    REAL(opendir);
    char path[PATH_MAX];
    if (!path_at(AT_FDCWD, file, path)) return real(file);
    if (fails()) return NULL;
    DIR *dir = real(file);
    if (!dir) return NULL;
    if (!real_readdir) real_readdir = (struct dirent64 *(*)(DIR *))dlsym(RTLD_NEXT, "readdir64");
    pthread_mutex_lock(&lock);
    struct known *one = known_of(path);
    if (!is_fresh(one->list_ms)) {
        struct listing fresh = {0, NULL};
        for (struct dirent64 *entry; (entry = real_readdir(dir)); fresh.count++) {
            fresh.entries = realloc(fresh.entries, (size_t)(fresh.count + 1) * sizeof *entry);
            memcpy(&fresh.entries[fresh.count], entry, entry->d_reclen);
        }
        one->listing = fresh;
        one->list_ms = now_ms();
    }
    for (int i = 0; i < 256; i++)
        if (!walks[i].dir) {
            walks[i].dir = dir;
            walks[i].listing = one->listing;
            walks[i].next = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return dir;
}

struct dirent64 *readdir64(DIR *dir) {
    REAL(readdir64);
    struct dirent64 *entry = NULL;
    int is_ours = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 256 && !is_ours; i++)
        if (walks[i].dir == dir) {
            is_ours = 1;
            if (walks[i].next < walks[i].listing.count) entry = &walks[i].listing.entries[walks[i].next++];
        }
    pthread_mutex_unlock(&lock);
    return is_ours ? entry : real(dir);
}

struct dirent *readdir(DIR *dir) { return (struct dirent *)readdir64(dir); }

int closedir(DIR *dir) {
    REAL(closedir);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 256; i++)
        if (walks[i].dir == dir) walks[i].dir = NULL;
    pthread_mutex_unlock(&lock);
    return real(dir);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (!result && clock == CLOCK_REALTIME) now->tv_sec += setting("STALEFS_CLOCK_S");
    return result;
}
