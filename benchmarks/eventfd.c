/* SPDX-License-Identifier: Apache-2.0 */
/* The floor of a parked round trip: two processes wake each other by eventfd and do nothing else.
   eventfd SECONDS NEAR FAR: pins the two to these cores (-1: to none) and prints the median round
   trip in nanoseconds. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define MOST 1000000

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int ascending(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

static void pin(int core)
{
    cpu_set_t cores;
    if (core < 0)
        return;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    uint64_t length_ns = (uint64_t)(atof(arguments[1]) * 1e9);
    uint32_t *trips = malloc(MOST * sizeof *trips);
    int there = eventfd(0, 0), back = eventfd(0, 0);
    uint64_t word;
    if (!trips || there < 0 || back < 0)
        return 1;
    pid_t child = fork();
    if (child < 0)
        return 1;
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pin(atoi(arguments[3]));
        while (read(there, &word, 8) == 8) {
            word = 1;
            if (write(back, &word, 8) != 8)
                break;
        }
        _exit(0);
    }
    pin(atoi(arguments[2]));
    int trip = 0;
    uint64_t begin = now_ns(), end = begin;
    while (trip < MOST && end - begin < length_ns) {
        uint64_t start = now_ns();
        word = 1;
        if (write(there, &word, 8) != 8 || read(back, &word, 8) != 8)
            return 1;
        end = now_ns();
        trips[trip++] = (uint32_t)(end - start);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    qsort(trips, (size_t)trip, sizeof *trips, ascending);
    printf("%u\n", trips[trip / 2]);
    return 0;
}
