// How threads share the work of a call. They form a team, and go through the call side by side: of
// each piece of work they take tasks as long as there are any, and go on when all are done.
//
// A thread that is not running, since other processes use its core, is missed while it holds a
// task, and in the end, where OpenMP waits for every thread. Who waits for a task spins for a
// moment and then sleeps: an idle core is what makes the system move a thread there. OpenMP's
// threads spin for long, and take the core from those that work: see Size.
#pragma once
#include <atomic>
#include <ctime>
#include <tuple>

#include "common.h"

#ifdef _OPENMP
extern "C" int omp_get_max_threads(), omp_get_num_threads(), omp_get_thread_num();
#else
static int omp_get_max_threads() { return 1; }
static int omp_get_num_threads() { return 1; }
static int omp_get_thread_num() { return 0; }
#endif

constexpr int64_t SERIAL = 1 << 14;  // numbers that one thread turns faster than others wake up

// How many threads a team has: as many as torch, unless other processes use the cores. If the
// caller then loses a quarter of its time, off its core or waiting for the team's threads, which
// are off theirs, the team goes on with a thread less. If it loses nothing, it tries one more, the
// later the more often that has failed.
class Size {
    static constexpr double SAMPLE = 0.001;  // seconds between two calls that are looked at
    static constexpr double WINDOW = 0.2;  // seconds of such calls, after which the size may change
    static constexpr int64_t LONGEST_WAIT = 32;  // windows
    int64_t most = 0, num_threads = 0, num_calm = 0, wait = 1;
    double start = 0, end = 0, cpu_time = 0, measured = 0, lost = 0;
    bool is_sampled = false;

    static double read(clockid_t clock) {
        timespec time;
        clock_gettime(clock, &time);
        return time.tv_sec + 1e-9 * time.tv_nsec;
    }

public:
    static Size& get() {  // the calling thread's
        static thread_local Size size;
        return size;
    }

    int64_t find() {
        if (int64_t num = omp_get_max_threads(); num != most) most = num_threads = num;
        return num_threads;
    }

    // A call of one thread tells nothing, and must not stand for the next one.
    void begin(bool is_shared) {
        start = read(CLOCK_MONOTONIC);
        is_sampled = is_shared && most > 1 && start - end > SAMPLE;
        if (is_sampled) cpu_time = -read(CLOCK_THREAD_CPUTIME_ID);
    }

    // The caller has done its share of the work. If it waits for others now, it may do so spinning.
    void leave() {
        if (is_sampled) cpu_time += read(CLOCK_THREAD_CPUTIME_ID);
    }

    void finish() {
        if (!is_sampled) return;
        end = read(CLOCK_MONOTONIC), measured += end - start, lost += end - start - cpu_time;
        if (measured < WINDOW) return;
        if (lost > measured / 4)
            num_threads = std::max<int64_t>(num_threads - 1, 1),
            wait = std::min(4 * wait, LONGEST_WAIT), num_calm = 0,
            measured = lost = 0;  // with more threads: it tells nothing about fewer
        else if (++num_calm >= wait)
            num_threads = std::min(num_threads + 1, most), wait = std::max<int64_t>(wait / 2, 1),
            num_calm = 0;
        measured /= 2, lost /= 2;  // what came before counts too: one bad moment is not enough
    }
};

class Team {
    static constexpr int64_t SPINS = 2000;
    alignas(64) std::atomic<int64_t> num_taken;  // of the call's tasks
    alignas(64) std::atomic<int64_t> num_done;
    static inline thread_local Team* current =
        nullptr;                             // what this thread belongs to during a call
    static inline thread_local int64_t end;  // of the tasks that it has come to

    static Team& own() {
        static thread_local Team team;
        return team;
    }

public:
    static inline thread_local int64_t num_threads;
    Buffer<float> memory;

    static Team& get() { return *current; }

    // work() on the threads of a team: of a new one, or, in one already, on this thread as on all
    // the others.
    template <class Work>
    static void form(bool is_worth_it, const Work& work) {
        if (current) return work();
        Team& team = own();
        Size& size = Size::get();
        team.num_taken = team.num_done = 0;
        size.begin(is_worth_it);
#pragma omp parallel num_threads(is_worth_it ? size.find() : 1)
        {
            current = &team, end = 0, num_threads = omp_get_num_threads();
            work();
            current = nullptr;
            if (omp_get_thread_num() == 0) size.leave();
        }
        size.finish();
    }

    // work() within a task: what it shares is done by this thread.
    template <class Work>
    static void work_alone(const Work& work) {
        static thread_local Team alone;
        auto outer = std::tuple(current, end, num_threads);
        alone.num_taken = alone.num_done = 0;
        current = &alone, end = 0, num_threads = 1;
        work();
        std::tie(current, end, num_threads) = outer;
    }

    // task(i) for every i below num_tasks, on whatever thread of the team.
    template <class Task>
    void share(int64_t num_tasks, const Task& task) {
        int64_t first = end, num = 0;
        end += num_tasks;
        for (int64_t next = num_taken; next < end;)
            if (num_taken.compare_exchange_weak(next, next + 1)) {
                task(next - first);
                num++, next = num_taken;
            }
        if (num > 0 && num_done.fetch_add(num) + num == end) num_done.notify_all();
        for (int64_t spin = 0, done; (done = num_done) < end; spin++)
            if (spin < SPINS)
                pause();
            else
                num_done.wait(done);
    }

private:
    static void pause() {
#ifdef __x86_64__
        _mm_pause();
#endif
    }
};

// task(i) for every i below `num`, of which each turns `size` numbers.
template <class Task>
static void parallel_for(int64_t num, int64_t size, const Task& task) {
    int64_t at_once = std::max<int64_t>(1, SERIAL / 2 / size);
    Team::form(num * size > SERIAL, [&] {
        Team::get().share((num + at_once - 1) / at_once, [&](int64_t first) {
            for (int64_t i = first * at_once; i < std::min(num, (first + 1) * at_once); i++)
                task(i);
        });
    });
}
