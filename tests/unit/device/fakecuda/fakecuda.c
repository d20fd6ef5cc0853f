/* SPDX-License-Identifier: Apache-2.0 */
/* A libcuda.so.1 for tests on machines without a GPU: what the cuda driver calls, and no kernels.

   Memory is a memfd per allocation, mapped where only this file looks ("shadow"); its device
   address is a range without any access, so that a host dereference faults. Streams are queues
   by handle, whatever its number. As with the real library: a call needs a context that is
   current in its thread, nothing works in the fork of a process that called cuInit, handles open
   in other processes only, and after a sticky error every call answers it. An event's two words
   (recorded, done) lie in a memfd, which other processes find by its owner's /proc entry.

     FAKECUDA_DELAY_MS      work runs that much later; -1: only when somebody waits for it
     FAKECUDA_DEVICES       how many there are (1); CUDA_VISIBLE_DEVICES selects among them
     FAKECUDA_MEMORY_BYTES  what one process may have in all
     FAKECUDA_GRANULARITY   of cuMemCreate (2 MiB)
     FAKECUDA_NO_IPC_EVENTS set: events cannot be shared
   The functions fakecuda_* change the same while it runs. It encodes a reading of the driver's
   documentation, and says nothing about what a real one does beyond that. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int R;
typedef uint64_t u64;
enum {
  OK = 0, INVALID = 1, NOMEM = 2, NOINIT = 3, NODEVICE = 100, BADDEVICE = 101, BADCONTEXT = 201,
  BADHANDLE = 400, NOTFOUND = 500, NOTREADY = 600, TIMEOUT = 702, UNSUPPORTED = 801, MAGIC = 0xfacade
};
static const struct { R code; const char *name, *text; } errors[] = {
  {OK, "CUDA_SUCCESS", "no error"}, {INVALID, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {NOMEM, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {NOINIT, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
  {NODEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
  {BADDEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
  {BADCONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
  {BADHANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
  {NOTREADY, "CUDA_ERROR_NOT_READY", "device not ready"},
  {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
  {TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
  {UNSUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}};

typedef struct { int device, retained; } Context;
typedef struct Phys { u64 nbytes; int fd, device, refs, exportable; } Phys;
typedef struct Range { /* a reservation; with phys: mapped */
  u64 base, nbytes, number; char *shadow; Phys *phys; int access, legacy, opens; u64 inode;
  struct Range *next;
} Range;
typedef struct Event { u64 *words; int fd, ipc, pid; } Event;
typedef struct Work { /* a copy, or with words: a record or a wait for words[1] >= value */
  char *target, *source, *owned; u64 nbytes, value; u64 *words; int waits, pid; double due;
  struct Work *next;
} Work;
typedef struct Stream { u64 handle; Work *head, **tail; struct Stream *next; } Stream;
typedef struct { u64 magic, pid, fd, inode, nbytes, device; char rest[16]; } Handle;
typedef struct { int type, id; } Place;
typedef struct { int type, handles; Place place; void *meta; unsigned char flags[8]; } Properties;
typedef struct { Place place; int flags; } Access;
_Static_assert(sizeof(Handle) == 64, "as an IPC handle");

static pthread_mutex_t mutex;
static pid_t owner;
static int devices, visible[16], delay_ms, sticky;
static u64 memory_limit = ~0ull, memory_used, granularity = 2 << 20, numbers;
static Context contexts[16];
static __thread Context *stack[16];
static __thread int depth;
static Range *ranges;
static Stream *streams;

#define CURRENT (depth ? stack[depth - 1] : 0)
#define READY do { if (owner != getpid()) return NOINIT; if (sticky) return sticky; } while (0)
#define NEED_CONTEXT do { READY; if (!CURRENT) return BADCONTEXT; } while (0)
#define LOCK pthread_mutex_lock(&mutex)
#define UNLOCK pthread_mutex_unlock(&mutex)
#define UNDER_LOCK(expression) do { LOCK; R r_ = (expression); UNLOCK; return r_; } while (0)

/* --- work on streams --------------------------------------------------------------------- */

static double now(void) {
  struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
static void nap(void) { struct timespec t = {0, 500000}; nanosleep(&t, 0); }
static Stream *stream_of(u64 handle) {
  for (Stream *s = streams; s; s = s->next) if (s->handle == handle) return s;
  Stream *s = calloc(1, sizeof *s); s->handle = handle; s->tail = &s->head;
  s->next = streams; return streams = s; }
static int finish_first(Stream *s) { /* 0: it waits for something */
  Work *w = s->head;
  if (w->waits) { if (w->words[1] < w->value && !kill(w->pid, 0)) return 0; }
  else if (w->words) w->words[1] = w->value;
  else memcpy(w->target, w->source, w->nbytes);
  if (!(s->head = w->next)) s->tail = &s->head;
  free(w->owned); free(w); return 1; }
static R finish(Stream *only) { /* all work of a stream, or of all; the lock is held */
  double limit = now() + 20;
  for (;;) {
    int blocked = 0, moved = 0;
    for (Stream *s = streams; s; s = s->next) {
      if (only && s != only) continue;
      while (s->head && finish_first(s)) moved = 1;
      blocked |= !!s->head; }
    if (!blocked) return OK;
    if (moved) continue;
    int others = 0; /* what it waits for may lie in another stream of ours */
    for (Stream *s = streams; s; s = s->next) while (s->head && finish_first(s)) others = 1;
    if (others) continue;
    if (now() > limit) return sticky = TIMEOUT;
    UNLOCK; nap(); LOCK; } }
static void *worker(void *none) {
  for (;;) { nap(); LOCK;
    for (Stream *s = streams; s; s = s->next)
      while (s->head && s->head->due <= now() && finish_first(s)) ;
    UNLOCK; }
  return none; }
static R start(u64 handle, Work work) {
  Stream *s = stream_of(handle); Work *w = malloc(sizeof *w); *w = work; w->next = 0;
  w->due = now() + delay_ms / 1e3; *s->tail = w; s->tail = &w->next;
  return delay_ms ? OK : finish(s); }

/* --- the library, devices, contexts ------------------------------------------------------ */

void fakecuda_delay(int ms) {
  static int running; delay_ms = ms; pthread_t t;
  if (ms > 0 && running != getpid()) { running = getpid(); pthread_create(&t, 0, worker, 0); pthread_detach(t); } }
void fakecuda_poison(int code) { sticky = code; }
void fakecuda_limit(u64 nbytes) { memory_limit = nbytes; }
u64 fakecuda_used(void) { return memory_used; }
static u64 number_of(const char *name, u64 otherwise) {
  const char *text = getenv(name); return text && *text ? strtoull(text, 0, 10) : otherwise; }
static void uuid_of(int physical, unsigned char *uuid) { memset(uuid, 0xfa, 16); uuid[15] = physical; }
static void find_devices(void) {
  int all = number_of("FAKECUDA_DEVICES", 1); char *text = getenv("CUDA_VISIBLE_DEVICES"), *at;
  devices = 0;
  if (!text) { for (; devices < all && devices < 16; devices++) visible[devices] = devices; return; }
  text = strdup(text);
  for (char *one = strtok_r(text, ",", &at); one; one = strtok_r(0, ",", &at)) {
    int physical = atoi(one); size_t n = strlen(one);
    if (n > 4 && !strncmp(one, "GPU-", 4)) physical = strtol(one + n - 2, 0, 16);
    if (physical < 0 || physical >= all || devices == 16) break; /* all after a wrong one hide */
    visible[devices++] = physical; }
  free(text); }
R cuInit(unsigned flags) {
  if (owner && owner != getpid()) return NOINIT;
  if (owner) return sticky;
  pthread_mutexattr_t a; pthread_mutexattr_init(&a);
  pthread_mutexattr_settype(&a, PTHREAD_MUTEX_RECURSIVE); pthread_mutex_init(&mutex, &a);
  find_devices();
  if (flags || !devices) return flags ? INVALID : NODEVICE;
  memory_limit = number_of("FAKECUDA_MEMORY_BYTES", memory_limit);
  granularity = number_of("FAKECUDA_GRANULARITY", granularity);
  owner = getpid(); if (getenv("FAKECUDA_DELAY_MS")) fakecuda_delay(atoi(getenv("FAKECUDA_DELAY_MS")));
  return OK; }
R cuDriverGetVersion(int *version) { *version = 13000; return OK; }
static R describe(R code, const char **out, int wants_text) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) { *out = wants_text ? errors[i].text : errors[i].name; return OK; }
  *out = 0; return INVALID; }
R cuGetErrorName(R code, const char **out) { return describe(code, out, 0); }
R cuGetErrorString(R code, const char **out) { return describe(code, out, 1); }
R cuDeviceGetCount(int *n) { READY; *n = devices; return OK; }
R cuDeviceGet(int *d, int i) { READY; if (i < 0 || i >= devices) return BADDEVICE; *d = i; return OK; }
R cuDeviceGetName(char *name, int n, int d) {
  READY; snprintf(name, n, "a fake device (%d), for tests", visible[d]); return OK; }
R cuDeviceGetUuid_v2(unsigned char *uuid, int d) { READY; uuid_of(visible[d], uuid); return OK; }
R cuDeviceGetAttribute(int *value, int which, int d) { READY; *value = 1; return which < 0 || d < 0; }
R cuDevicePrimaryCtxRetain(Context **c, int d) {
  READY; *c = &contexts[d]; contexts[d].device = d; contexts[d].retained++; return OK; }
R cuDevicePrimaryCtxRelease_v2(int d) { READY; contexts[d].retained--; return OK; }
R cuCtxPushCurrent_v2(Context *c) {
  READY; if (!c || !c->retained || depth == 16) return BADCONTEXT; stack[depth++] = c; return OK; }
R cuCtxPopCurrent_v2(Context **c) { /* also when lost */
  if (!depth) return BADCONTEXT; depth--; if (c) *c = stack[depth]; return sticky; }
R cuCtxSetCurrent(Context *c) { READY; depth = !!c; stack[0] = c; return OK; }
R cuCtxGetCurrent(Context **c) { READY; *c = CURRENT; return OK; }
R cuCtxSynchronize(void) { NEED_CONTEXT; UNDER_LOCK(finish(0)); }

/* --- memory ------------------------------------------------------------------------------ */

static u64 inode_of(int fd) { struct stat s; return fstat(fd, &s) ? 0 : s.st_ino; }
static Phys *phys_make(u64 nbytes, int device, int exportable) {
  if (memory_used + nbytes > memory_limit) return 0;
  int fd = memfd_create("fakecuda", MFD_CLOEXEC); Handle tail = {MAGIC, 0, 0, 0, nbytes, visible[device], {0}};
  if (fd < 0 || ftruncate(fd, nbytes) || pwrite(fd, &tail, sizeof tail, nbytes) != sizeof tail) return 0;
  Phys *p = calloc(1, sizeof *p); *p = (Phys){nbytes, fd, device, 1, exportable};
  memory_used += nbytes; return p; }
static Phys *phys_open(int fd, int device) { /* takes fd over */
  struct stat s; Handle tail = {0};
  if (fd < 0 || fstat(fd, &s) || s.st_size < (off_t)sizeof tail ||
      pread(fd, &tail, sizeof tail, s.st_size - sizeof tail) != sizeof tail || tail.magic != MAGIC ||
      (int)tail.device != visible[device]) { if (fd >= 0) close(fd); return 0; }
  Phys *p = calloc(1, sizeof *p); *p = (Phys){tail.nbytes, fd, device, 1, 2}; return p; }
static void phys_drop(Phys *p) {
  if (--p->refs) return;
  close(p->fd); if (p->exportable < 2) memory_used -= p->nbytes; free(p); }
static Range *reserve(u64 nbytes) {
  void *at = mmap(0, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return 0;
  Range *r = calloc(1, sizeof *r); r->base = (u64)at; r->nbytes = nbytes; r->next = ranges; return ranges = r; }
static R map(Range *r, Phys *p) {
  void *at = mmap(0, r->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0);
  if (at == MAP_FAILED) return NOMEM;
  r->shadow = at; r->phys = p; p->refs++; r->number = ++numbers; return OK; }
static void unmap(Range *r) { munmap(r->shadow, r->nbytes); phys_drop(r->phys); r->phys = 0; r->access = 0; }
static void unreserve(Range *r) {
  for (Range **at = &ranges; *at; at = &(*at)->next) if (*at == r) { *at = r->next; break; }
  munmap((void *)r->base, r->nbytes); free(r); }
static Range *range_at(u64 address, u64 nbytes) {
  for (Range *r = ranges; r; r = r->next)
    if (r->base <= address && address + (nbytes ? nbytes : 1) <= r->base + r->nbytes) return r;
  return 0; }
static char *bytes_at(u64 address, u64 nbytes) {
  Range *r = range_at(address, nbytes); return r && r->phys && r->access == 3 ? r->shadow + (address - r->base) : 0; }

R cuMemGetAllocationGranularity(size_t *n, const Properties *p, int option) {
  READY; if (p->type != 1 || option > 1) return INVALID; *n = granularity; return OK; }
R cuMemCreate(u64 *handle, size_t n, const Properties *p, u64 flags) {
  READY; if (!n || n % granularity || p->place.type != 1 || p->place.id >= devices || flags) return INVALID;
  LOCK; Phys *made = phys_make(n, p->place.id, p->handles & 1); UNLOCK;
  *handle = (u64)made; return made ? OK : NOMEM; }
R cuMemRelease(u64 handle) { READY; LOCK; phys_drop((Phys *)handle); UNLOCK; return OK; }
R cuMemExportToShareableHandle(void *out, u64 handle, int type, u64 flags) {
  NEED_CONTEXT; Phys *p = (Phys *)handle; if (type != 1 || !p->exportable || flags) return INVALID;
  *(int *)out = fcntl(p->fd, F_DUPFD_CLOEXEC, 3); return *(int *)out < 0 ? INVALID : OK; }
R cuMemImportFromShareableHandle(u64 *handle, void *fd, int type) {
  NEED_CONTEXT; Phys *p = type == 1 ? phys_open(fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 3), CURRENT->device) : 0;
  *handle = (u64)p; return p ? OK : INVALID; }
R cuMemAddressReserve(u64 *at, size_t n, size_t align, u64 wanted, u64 flags) {
  READY; if (!n || n % granularity || flags || wanted || align > granularity) return INVALID;
  LOCK; Range *r = reserve(n); UNLOCK; *at = r ? r->base : 0; return r ? OK : NOMEM; }
R cuMemAddressFree(u64 at, size_t n) {
  READY; LOCK; Range *r = range_at(at, n); R e = r && r->base == at && r->nbytes == n && !r->phys ? OK : INVALID;
  if (!e) unreserve(r); UNLOCK; return e; }
R cuMemMap(u64 at, size_t n, size_t offset, u64 handle, u64 flags) {
  READY; LOCK; Range *r = range_at(at, n); Phys *p = (Phys *)handle;
  R e = r && r->base == at && r->nbytes == n && !r->phys && !offset && !flags && n <= p->nbytes ? map(r, p) : INVALID;
  UNLOCK; return e; }
R cuMemUnmap(u64 at, size_t n) {
  READY; LOCK; Range *r = range_at(at, n); R e = r && r->phys && r->nbytes == n ? finish(0) : INVALID;
  if (!e) unmap(r); UNLOCK; return e; }
R cuMemSetAccess(u64 at, size_t n, const Access *access, size_t count) {
  READY; LOCK; Range *r = range_at(at, n); R e = r && r->phys && count == 1 ? OK : INVALID;
  if (!e) r->access = access->flags; UNLOCK; return e; }
R cuMemAlloc_v2(u64 *at, size_t n) {
  NEED_CONTEXT; LOCK; u64 whole = (n + 4095) & ~4095ull; Phys *p = n ? phys_make(whole, CURRENT->device, 0) : 0;
  Range *r = p ? reserve(whole) : 0; R e = r ? map(r, p) : NOMEM; if (p) phys_drop(p);
  if (!e) { r->access = 3; r->legacy = 1; *at = r->base; } UNLOCK; return e; }
R cuMemFree_v2(u64 at) {
  NEED_CONTEXT; LOCK; Range *r = range_at(at, 1); R e = r && r->legacy && r->base == at ? finish(0) : INVALID;
  if (!e) { unmap(r); unreserve(r); } UNLOCK; return e; }
R cuPointerGetAttribute(void *out, int which, u64 at) {
  NEED_CONTEXT; LOCK; Range *r = range_at(at, 1); R e = r && r->phys ? OK : INVALID;
  if (!e) switch (which) {
    case 7: *(u64 *)out = r->number; break;
    case 9: *(int *)out = r->phys->device; break;
    case 10: *(int *)out = r->legacy; break;
    case 11: *(u64 *)out = r->base; break;
    case 12: *(u64 *)out = r->nbytes; break;
    default: e = UNSUPPORTED; }
  UNLOCK; return e; }
R cuPointerGetAttributes(unsigned n, const int *which, void **out, u64 at) { /* zeros for what is none */
  NEED_CONTEXT; for (unsigned i = 0; i < n; i++)
    if (cuPointerGetAttribute(out[i], which[i], at)) {
      if (which[i] == 9) *(int *)out[i] = -2; else memset(out[i], 0, which[i] == 10 ? 4 : 8); }
  return OK; }
static R copy(char *to, char *from, size_t n, u64 stream, char *owned) {
  if (!to || !from) { free(owned); return INVALID; }
  return start(stream, (Work){.target = to, .source = from, .nbytes = n, .owned = owned}); }
R cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t n, u64 stream) {
  NEED_CONTEXT; char *own = malloc(n ? n : 1); memcpy(own, from, n);
  UNDER_LOCK(copy(bytes_at(to, n), own, n, stream, own)); }
R cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t n, u64 stream) {
  NEED_CONTEXT; UNDER_LOCK(copy(bytes_at(to, n), bytes_at(from, n), n, stream, 0)); }
R cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t n, u64 stream) {
  NEED_CONTEXT; LOCK; char *source = bytes_at(from, n); R e = source ? finish(stream_of(stream)) : INVALID;
  if (!e) memcpy(to, source, n); UNLOCK; return e; }

/* --- streams, events, handles ------------------------------------------------------------ */

R cuStreamCreate(u64 *stream, unsigned flags) { NEED_CONTEXT; *stream = 0x1000 + ++numbers; return flags > 1; }
R cuStreamDestroy_v2(u64 stream) { NEED_CONTEXT; UNDER_LOCK(finish(stream_of(stream))); }
R cuStreamSynchronize(u64 stream) { NEED_CONTEXT; UNDER_LOCK(finish(stream_of(stream))); }
static int open_of(const Handle *h, u64 magic) { /* the descriptor behind another process's handle */
  char path[64]; snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)h->pid, (int)h->fd);
  int fd = h->magic == magic ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd >= 0 && inode_of(fd) != h->inode) { close(fd); fd = -1; }
  return fd; }
static Event *event_at(int fd, int ipc, int pid) {
  Event *e = calloc(1, sizeof *e); *e = (Event){mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), fd, ipc, pid};
  return e; }
R cuEventCreate(Event **event, unsigned flags) {
  NEED_CONTEXT; int ipc = !!(flags & 4), fd = memfd_create("fakecuda-event", MFD_CLOEXEC);
  if ((ipc && !(flags & 2)) || fd < 0 || ftruncate(fd, 4096)) { close(fd); return INVALID; }
  *event = event_at(fd, ipc, getpid()); return OK; }
R cuEventDestroy_v2(Event *e) {
  NEED_CONTEXT; LOCK; finish(0); munmap(e->words, 4096); close(e->fd); free(e); UNLOCK; return OK; }
R cuEventRecord(Event *e, u64 stream) {
  NEED_CONTEXT; LOCK; R r = start(stream, (Work){.words = e->words, .value = ++e->words[0]}); UNLOCK; return r; }
R cuEventQuery(Event *e) { NEED_CONTEXT; return e->words[1] < e->words[0] ? NOTREADY : OK; }
R cuStreamWaitEvent(u64 stream, Event *e, unsigned flags) {
  NEED_CONTEXT; if (flags) return INVALID;
  UNDER_LOCK(start(stream, (Work){.words = e->words, .value = e->words[0], .waits = 1, .pid = e->pid})); }
R cuIpcGetEventHandle(Handle *h, Event *e) {
  NEED_CONTEXT; if (!e->ipc) return INVALID;
  if (getenv("FAKECUDA_NO_IPC_EVENTS")) return UNSUPPORTED;
  memset(h, 0, sizeof *h); *h = (Handle){MAGIC + 1, getpid(), e->fd, inode_of(e->fd), 0, 0, {0}}; return OK; }
R cuIpcOpenEventHandle(Event **event, Handle h) {
  NEED_CONTEXT; if ((pid_t)h.pid == getpid()) return BADCONTEXT;
  int fd = open_of(&h, MAGIC + 1); if (fd < 0) return BADHANDLE;
  *event = event_at(fd, 0, h.pid); return OK; }
R cuIpcGetMemHandle(Handle *h, u64 at) {
  NEED_CONTEXT; Range *r = range_at(at, 1); if (!r || !r->legacy || r->base != at) return INVALID;
  *h = (Handle){MAGIC + 2, getpid(), r->phys->fd, inode_of(r->phys->fd), r->nbytes, 0, {0}}; return OK; }
R cuIpcOpenMemHandle_v2(u64 *at, Handle h, unsigned flags) {
  NEED_CONTEXT; if (flags != 1) return INVALID; if ((pid_t)h.pid == getpid()) return BADCONTEXT;
  LOCK; Range *r; R e = OK;
  for (r = ranges; r; r = r->next) if (r->opens && r->inode == h.inode) break;
  if (!r) {
    Phys *p = phys_open(open_of(&h, MAGIC + 2), CURRENT->device); r = p ? reserve(h.nbytes) : 0;
    e = r ? map(r, p) : BADHANDLE; if (p) phys_drop(p); if (!e) { r->access = 3; r->inode = h.inode; } }
  if (!e) { r->opens++; *at = r->base; } UNLOCK; return e; }
R cuIpcCloseMemHandle(u64 at) {
  NEED_CONTEXT; LOCK; Range *r = range_at(at, 1); R e = r && r->opens ? finish(0) : INVALID;
  if (!e && !--r->opens) { unmap(r); unreserve(r); } UNLOCK; return e; }

/* --- what there is; anything else is not found --------------------------------------------- */

#define ENTRIES(E) E(cuInit,) E(cuDriverGetVersion,) E(cuGetErrorName,) E(cuGetErrorString,) \
  E(cuDeviceGetCount,) E(cuDeviceGet,) E(cuDeviceGetName,) E(cuDeviceGetUuid, _v2) \
  E(cuDeviceGetAttribute,) E(cuDevicePrimaryCtxRetain,) E(cuDevicePrimaryCtxRelease, _v2) \
  E(cuCtxPushCurrent, _v2) E(cuCtxPopCurrent, _v2) E(cuCtxSetCurrent,) E(cuCtxGetCurrent,) \
  E(cuCtxSynchronize,) E(cuMemGetAllocationGranularity,) E(cuMemCreate,) E(cuMemRelease,) \
  E(cuMemExportToShareableHandle,) E(cuMemImportFromShareableHandle,) E(cuMemAddressReserve,) \
  E(cuMemAddressFree,) E(cuMemMap,) E(cuMemUnmap,) E(cuMemSetAccess,) E(cuMemAlloc, _v2) \
  E(cuMemFree, _v2) E(cuPointerGetAttribute,) E(cuPointerGetAttributes,) E(cuMemcpyHtoDAsync, _v2) \
  E(cuMemcpyDtoDAsync, _v2) E(cuMemcpyDtoHAsync, _v2) E(cuStreamCreate,) E(cuStreamDestroy, _v2) \
  E(cuStreamSynchronize,) E(cuEventCreate,) E(cuEventDestroy, _v2) E(cuEventRecord,) \
  E(cuEventQuery,) E(cuStreamWaitEvent,) E(cuIpcGetEventHandle,) E(cuIpcOpenEventHandle,) \
  E(cuIpcGetMemHandle,) E(cuIpcOpenMemHandle, _v2) E(cuIpcCloseMemHandle,)
R cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *status) {
#define ENTRY(n, suffix) {#n, (void *)n##suffix},
  static const struct { const char *name; void *function; } table[] = {ENTRIES(ENTRY)
    {"cuGetProcAddress", (void *)cuGetProcAddress_v2}};
  *function = 0; if (status) *status = 1;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(table[i].name, name)) { *function = table[i].function; if (status) *status = 0; return OK; }
  return version < 0 || flags > 7 ? INVALID : NOTFOUND; }
