/* A program to be frozen, which notices if that changes anything for it. x86-64.
 *
 *   victim IMAGE SIZE_MIB DIRTY_MIB WHAT [dontfork] [filter] [storm] [hole]
 *
 * It maps IMAGE privately, writes to its first DIRTY_MIB, says "ready PAGES", and then does WHAT in its main thread
 * until its standard input ends: read, futex, poll, nanosleep, uring, or user (no system call at all). Each
 * time all registers, flags and results are compared with what they must be. Other threads compute meanwhile and count
 * in the mapped memory. At the end it compares the memory and says "ok TURNS"; anything wrong ends it with a sentence. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL

static volatile int stopping;
static int storm;
static uint8_t *memory;
static unsigned long pages, hole_start, hole_end;
static int tube[2];
static pthread_barrier_t started;

#define fail(...) (dprintf(1, "wrong: " __VA_ARGS__), dprintf(1, " (errno %d)\n", errno), _exit(1))

/* Makes a system call with marked registers and reports what they are after it: rax, flags, then
 * rdi rsi rdx r10 r8 r9 rbx r12 r13 r14 r15, and xmm7. */
struct seen {
    long rax, flags, rdi, rsi, rdx, r10, r8, r9, rbx, r12, r13, r14, r15;
    double xmm7;
};
void marked(long nr, const long arguments[6], struct seen *seen);
__asm__(".text\nmarked:\n"
        "push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15; push %rdx\n"
        "mov %rdi,%rax; mov %rsi,%rbp\n"
        "movabs $0x4010000000000000,%rbx; movq %rbx,%xmm7\n" /* 4.0 */
        "mov 0(%rbp),%rdi; mov 8(%rbp),%rsi; mov 16(%rbp),%rdx; mov 24(%rbp),%r10; mov 32(%rbp),%r8; mov 40(%rbp),%r9\n"
        "movabs $0x1b1b1b1b1b1b1b1b,%rbx; movabs $0x1212121212121212,%r12; movabs $0x1313131313131313,%r13\n"
        "movabs $0x1414141414141414,%r14; movabs $0x1515151515151515,%r15\n"
        "std; stc\n"
        "syscall\n"
        "pushfq\n"
        "cld\n"
        "pop %rcx\n"
        "mov (%rsp),%rbp\n"
        "mov %rax,0(%rbp); mov %rcx,8(%rbp); mov %rdi,16(%rbp); mov %rsi,24(%rbp); mov %rdx,32(%rbp); mov %r10,40(%rbp)\n"
        "mov %r8,48(%rbp); mov %r9,56(%rbp); mov %rbx,64(%rbp); mov %r12,72(%rbp); mov %r13,80(%rbp); mov %r14,88(%rbp)\n"
        "mov %r15,96(%rbp); movq %xmm7,104(%rbp)\n"
        "pop %rdx; pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx\n"
        "ret\n");

/* Counts down from *turns* without touching flags, then says whether every register is what it was. */
long computes(long turns);
__asm__(".text\ncomputes:\n"
        "push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15\n"
        "mov %rdi,%rcx\n"
        "mov $0x0a,%rax; mov $0x0b,%rbx; mov $0x0d,%rdx; mov $0x51,%rsi; mov $0xd1,%rdi; mov $0xb9,%rbp; mov $8,%r8; mov $9,%r9\n"
        "mov $10,%r10; mov $11,%r11; mov $12,%r12; mov $13,%r13; mov $14,%r14; mov $15,%r15\n"
        "movq %r15,-16(%rsp)\n" /* below the stack: the red zone */
        "stc\n"
        "1: lea -1(%rcx),%rcx; jrcxz 2f; jmp 1b\n"
        "2: jnc 3f\n"
        "cmp $0x0a,%rax; jne 3f; cmp $0x0b,%rbx; jne 3f; cmp $0x0d,%rdx; jne 3f; cmp $0x51,%rsi; jne 3f; cmp $0xd1,%rdi; jne 3f\n"
        "cmp $0xb9,%rbp; jne 3f; cmp $8,%r8; jne 3f; cmp $9,%r9; jne 3f; cmp $10,%r10; jne 3f; cmp $11,%r11; jne 3f\n"
        "cmp $12,%r12; jne 3f; cmp $13,%r13; jne 3f; cmp $14,%r14; jne 3f; cmp $15,%r15; jne 3f; cmp %r15,-16(%rsp); jne 3f\n"
        "mov $1,%eax; jmp 4f\n"
        "3: xor %eax,%eax\n"
        "4: pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx\n"
        "ret\n");

static long call(long nr, long a, long b, long c, long d, long e, long f) {
    long arguments[6] = {a, b, c, d, e, f};
    struct seen s;
    marked(nr, arguments, &s);
    if (s.rdi != a || s.rsi != b || s.rdx != c || s.r10 != d || s.r8 != e || s.r9 != f) fail("an argument of call %ld changed", nr);
    if (s.rbx != 0x1b1b1b1b1b1b1b1b || s.r12 != 0x1212121212121212 || s.r13 != 0x1313131313131313 ||
        s.r14 != 0x1414141414141414 || s.r15 != 0x1515151515151515 || s.xmm7 != 4.0)
        fail("a register of call %ld changed", nr);
    if ((s.flags & 0x401) != 0x401) fail("flags of call %ld changed: %lx", nr, s.flags);
    return s.rax;
}

static void expect(const char *what, long result, long wanted) {
    if (result == wanted || (storm && result == -EINTR)) return;
    fail("%s gave %ld instead of %ld", what, result, wanted);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static struct {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail;
    struct io_uring_sqe *sqes;
} ring;

static void make_ring(void) {
    struct io_uring_params p = {0};
    ring.fd = syscall(SYS_io_uring_setup, 4, &p);
    if (ring.fd < 0) {
        dprintf(1, "skip no io_uring\n");
        _exit(0);
    }
    uint8_t *sq = mmap(0, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_SQ_RING);
    uint8_t *cq = mmap(0, p.cq_off.cqes + p.cq_entries * 16, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_CQ_RING);
    ring.sqes = mmap(0, p.sq_entries * sizeof *ring.sqes, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_SQES);
    ring.sq_tail = (void *)(sq + p.sq_off.tail), ring.sq_mask = (void *)(sq + p.sq_off.ring_mask);
    ring.sq_array = (void *)(sq + p.sq_off.array), ring.cq_head = (void *)(cq + p.cq_off.head), ring.cq_tail = (void *)(cq + p.cq_off.tail);
}

static void uring_turn(void) {
    static struct __kernel_timespec limit = {.tv_nsec = 5000000};
    unsigned at = *ring.sq_tail & *ring.sq_mask;
    memset(&ring.sqes[at], 0, sizeof ring.sqes[at]);
    ring.sqes[at].opcode = IORING_OP_TIMEOUT, ring.sqes[at].addr = (uintptr_t)&limit, ring.sqes[at].len = 1;
    ring.sq_array[at] = at;
    __atomic_store_n(ring.sq_tail, *ring.sq_tail + 1, __ATOMIC_RELEASE);
    long done = call(SYS_io_uring_enter, ring.fd, 1, 1, IORING_ENTER_GETEVENTS, 0, 8);
    /* Interrupted by a stop, this call says so, as after SIGSTOP and SIGCONT. */
    while (__atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE) == *ring.cq_head) {
        if (done != 1 && done != 0 && done != -EINTR) fail("io_uring_enter gave %ld", done);
        done = call(SYS_io_uring_enter, ring.fd, 0, 1, IORING_ENTER_GETEVENTS, 0, 8);
    }
    *ring.cq_head += 1;
}

static void turn(const char *what) {
    static int word;
    struct timespec limit = {.tv_nsec = 5000000};
    double started = now();
    if (!strcmp(what, "read")) {
        char byte;
        expect("read", call(SYS_read, tube[0], (long)&byte, 1, 0, 5, 6), 1);
        return;
    } else if (!strcmp(what, "futex")) {
        expect("futex", call(SYS_futex, (long)&word, FUTEX_WAIT, 0, (long)&limit, 5, 6), -ETIMEDOUT);
    } else if (!strcmp(what, "poll")) {
        expect("poll", call(SYS_poll, 0, 0, 5, 4, 5, 6), 0);
    } else if (!strcmp(what, "nanosleep")) {
        expect("nanosleep", call(SYS_nanosleep, (long)&limit, 0, 3, 4, 5, 6), 0);
    } else if (!strcmp(what, "uring")) {
        uring_turn();
    } else {
        if (!computes(1000000)) fail("a register changed while computing");
        return;
    }
    if (!storm && now() - started < 0.0049) fail("%s came back after %f s", what, now() - started);
}

static void *idle(void *unused) {
    if (unused) pthread_barrier_wait(&started);
    for (;;) usleep(20000);
    return unused;
}

static void *feed(void *unused) {
    pthread_barrier_wait(&started);
    for (;;) {
        struct timespec limit = {.tv_nsec = 3000000};
        nanosleep(&limit, 0);
        if (write(tube[1], "x", 1) != 1) fail("write");
    }
    return unused;
}

/* Counts in the first page: the second word never passes the first. */
static void *count(void *unused) {
    volatile uint64_t *words = (void *)memory;
    pthread_barrier_wait(&started);
    for (;;) {
        words[1]++, words[2]++;
        if (words[1] != words[2]) fail("memory changed under a thread");
        if (!computes(5000)) fail("a register of another thread changed");
    }
    return unused;
}

static void *await_end(void *unused) {
    char byte;
    pthread_barrier_wait(&started);
    for (long got = 1; got > 0 || (got < 0 && errno == EINTR);) got = read(0, &byte, 1);
    stopping = 1;
    return idle(0); /* the end of a thread makes calls that the filter forbids */
}

static void check_memory(void) {
    for (unsigned long i = 1; i < pages; i++) {
        uint64_t *page = (void *)(memory + i * PAGE);
        uint64_t wanted = i >= hole_start && i < hole_end ? 0 : i % 8 ? i * 0x9e3779b97f4a7c15 : 0;
        if (page[0] != wanted || page[511] != wanted) fail("page %lu changed", i);
    }
}

/* Ends the process for every call that freezing makes and this program does not. */
static void forbid(void) {
    int calls[] = {SYS_clone, SYS_fork, SYS_vfork, SYS_wait4, SYS_madvise, SYS_setsid, SYS_close_range, SYS_pause, SYS_prctl, SYS_rt_sigprocmask};
    int n = sizeof calls / sizeof *calls;
    struct sock_filter filter[32], *f = filter;
    *f++ = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < n; i++) *f++ = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], n - i, 0);
    *f++ = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    *f++ = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = {f - filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program))
        fail("seccomp");
}

static void ignore(int number) { (void)number; }

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    const char *what = argv[4];
    unsigned long size = strtoul(argv[2], 0, 10) << 20;
    pages = (strtoul(argv[3], 0, 10) << 20) / PAGE;
    int unforked = 0, filtered = 0;
    for (int i = 5; i < argc; i++) {
        unforked |= !strcmp(argv[i], "dontfork"), filtered |= !strcmp(argv[i], "filter"), storm |= !strcmp(argv[i], "storm");
        if (!strcmp(argv[i], "hole")) hole_start = 16, hole_end = 32;
    }
    int fd = open(argv[1], O_RDONLY);
    memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (memory == MAP_FAILED) fail("mmap");
    for (unsigned long i = 0; i < pages; i++) {
        uint64_t *page = (void *)(memory + i * PAGE);
        page[0] = page[511] = i % 8 ? i * 0x9e3779b97f4a7c15 : 0; /* each eighth page is zero */
    }
    if (hole_end && mmap(memory + hole_start * PAGE, (hole_end - hole_start) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        fail("mmap");
    if (unforked) madvise(memory, size, MADV_DONTFORK);
    if (pipe(tube)) fail("pipe");
    if (!strcmp(what, "uring")) make_ring();
    pthread_t thread;
    pthread_barrier_init(&started, 0, 4); /* a thread that starts makes calls that the filter forbids */
    pthread_create(&thread, 0, await_end, 0);
    pthread_create(&thread, 0, strcmp(what, "still") ? count : idle, "waits");
    pthread_create(&thread, 0, feed, 0);
    pthread_barrier_wait(&started);
    if (storm) {
        struct sigaction action = {.sa_handler = ignore};
        sigaction(SIGALRM, &action, 0);
        sigset_t alarms;
        sigemptyset(&alarms), sigaddset(&alarms, SIGALRM);
        struct itimerval often = {{0, 300}, {0, 300}};
        setitimer(ITIMER_REAL, &often, 0);
    }
    if (filtered) forbid();
    dprintf(1, "ready %lx %lx\n", (long)memory, size);
    unsigned long turns = 0;
    while (!stopping) turn(strcmp(what, "still") ? what : "nanosleep"), turns++;
    check_memory();
    dprintf(1, "ok %lu\n", turns);
    _exit(0);
}
