// Counts what torch's CPU allocator gives out and takes back, in every thread of a process. Preloaded, it stands before
// the two functions of libc10 through which all of that memory passes, and calls them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1u << 20) // open addressing, by address; far more than a tiny model has blocks

static struct { void *address; size_t size; } table[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t level, peak;
static void *(*real_alloc)(size_t);
static void (*real_free)(void *);

static void *original(const char *name) {
    void *library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) abort();
    return found;
}

static uint32_t slot_of(const void *address) {
    return (uint32_t)(((uintptr_t)address >> 4) * 0x9E3779B97F4A7C15ull >> 44) & (SLOTS - 1);
}

static void enter(void *address, size_t size) {
    uint32_t at = slot_of(address);
    while (table[at].address) at = (at + 1) & (SLOTS - 1);
    table[at].address = address;
    table[at].size = size;
}

// The size of a block that goes; those after it move up, so that no search ends too early.
static size_t leave(void *address) {
    uint32_t at = slot_of(address);
    while (table[at].address != address) {
        if (!table[at].address) return 0;
        at = (at + 1) & (SLOTS - 1);
    }
    size_t size = table[at].size;
    for (uint32_t next = (at + 1) & (SLOTS - 1); table[next].address; next = (next + 1) & (SLOTS - 1)) {
        uint32_t wanted = slot_of(table[next].address);
        if (((next - wanted) & (SLOTS - 1)) >= ((next - at) & (SLOTS - 1))) {
            table[at] = table[next];
            at = next;
        }
    }
    table[at].address = NULL;
    return size;
}

// c10::alloc_cpu(unsigned long)
void *_ZN3c109alloc_cpuEm(size_t size) {
    if (!real_alloc) *(void **)&real_alloc = original("_ZN3c109alloc_cpuEm");
    void *address = real_alloc(size);
    if (!address) return address;
    pthread_mutex_lock(&lock);
    enter(address, size);
    level += (int64_t)size;
    if (level > peak) peak = level;
    pthread_mutex_unlock(&lock);
    return address;
}

// c10::free_cpu(void*)
void _ZN3c108free_cpuEPv(void *address) {
    if (!real_free) *(void **)&real_free = original("_ZN3c108free_cpuEPv");
    if (address) {
        pthread_mutex_lock(&lock);
        level -= (int64_t)leave(address);
        pthread_mutex_unlock(&lock);
    }
    real_free(address);
}

// Bytes that are given out now, and the most of them since the last call.
void tuner_allocations(int64_t found[2]) {
    pthread_mutex_lock(&lock);
    found[0] = level;
    found[1] = peak;
    peak = level;
    pthread_mutex_unlock(&lock);
}

// Bytes that are given out now.
int64_t tuner_allocated_now(void) {
    pthread_mutex_lock(&lock);
    int64_t found = level;
    pthread_mutex_unlock(&lock);
    return found;
}
