/* Preloaded into the measured process: a wall clock that can be stepped, names under `.soak` whose
   look-up can be made to hang, and memory that is handed back when asked for. All of it is told
   through a file that the soak maps, too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <netdb.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000LL
#define LONGEST_HANG_S 30

struct told {
  volatile int64_t offset_ns; /* added to the wall clock */
  volatile int64_t hangs;     /* not 0: names under .soak are not answered */
  volatile int64_t hung;      /* how many look-ups met that */
  volatile int64_t asked;     /* how often it is to hand back what it keeps for later */
  volatile int64_t handed;    /* how often it has */
};

static struct told nothing, *told = &nothing;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_getaddrinfo)(const char *, const char *, const struct addrinfo *,
                               struct addrinfo **);

__attribute__((constructor)) static void begin(void) {
  real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  real_getaddrinfo = dlsym(RTLD_NEXT, "getaddrinfo");
  const char *path = getenv("SOAK_TOLD");
  int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(struct told), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) told = mapped;
}

/* Where the process looks at a clock, which is outside of its allocator. */
static void hand_back(void) {
  static volatile int64_t begun;
  int64_t asked = told->asked, before = begun;
  if (asked == before || !__sync_bool_compare_and_swap(&begun, before, asked)) return;
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  told->handed = asked;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  hand_back();
  int failed = real_clock_gettime(clock, time);
  if (!failed && told->offset_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t ns = time->tv_sec * NS + time->tv_nsec + told->offset_ns;
    time->tv_sec = ns / NS;
    time->tv_nsec = ns % NS;
  }
  return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *where) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (where) *where = now.tv_sec;
  return now.tv_sec;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
  size_t length = node ? strlen(node) : 0;
  int asks_nobody = hints && hints->ai_flags & AI_NUMERICHOST;
  if (length < 5 || strcmp(node + length - 5, ".soak") || asks_nobody)
    return real_getaddrinfo(node, service, hints, found);
  if (told->hangs) {
    __sync_fetch_and_add(&told->hung, 1);
    struct timespec pause = {0, 50000000};
    for (int looks = 0; told->hangs; looks++) {
      if (looks == LONGEST_HANG_S * 20) return EAI_AGAIN;
      nanosleep(&pause, NULL);
    }
  }
  return real_getaddrinfo("127.0.0.1", service, hints, found);
}
