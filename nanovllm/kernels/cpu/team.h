// How threads share the work of a call. They form a team, and go through the call side by side: of each piece of work they
// take tasks as long as there are any, and go on when all are done.
//
// A thread that is not running, since other processes use its core, is missed only while it holds a task. Who waits for it
// spins for a moment and then sleeps: an idle core is what makes the system move such a thread there. (OpenMP's own threads
// wait for every thread after every loop, and spin for long.)
#pragma once
#include <atomic>
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

class Team {
    static constexpr int64_t SPINS = 2000;
    alignas(64) std::atomic<int64_t> num_taken;  // of the call's tasks
    alignas(64) std::atomic<int64_t> num_done;
    static inline thread_local Team* current = nullptr;  // what this thread belongs to during a call
    static inline thread_local int64_t end;              // of the tasks that it has come to

    static Team& own() {
        static thread_local Team team;
        return team;
    }

  public:
    static inline thread_local int64_t num_threads;
    Buffer<float> memory;

    static Team& get() { return *current; }

    // work() on the threads of a team: of a new one, or, in one already, on this thread as on all the others.
    template <class Work>
    static void form(bool is_worth_it, const Work& work) {
        if (current) return work();
        Team& team = own();
        team.num_taken = team.num_done = 0;
#pragma omp parallel if (is_worth_it)
        {
            current = &team, end = 0, num_threads = omp_get_num_threads();
            work();
            current = nullptr;
        }
    }

    // work() within a task: what it shares is done by this thread.
    template <class Work>
    static void leave(const Work& work) {
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
            for (int64_t i = first * at_once; i < std::min(num, (first + 1) * at_once); i++) task(i);
        });
    });
}
