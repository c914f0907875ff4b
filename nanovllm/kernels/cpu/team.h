// Shares the work of a call among threads. The threads form a team and run through the call side by
// side. In each parallel section they take tasks until none is left, and continue when all tasks
// are done.
//
// A thread can lose its core to another process. The others wait for it only if it holds a task,
// and at the end of the call, where OpenMP waits for every thread. A waiting thread spins briefly
// and then sleeps, because an idle core is what makes the system move a thread there. OpenMP's own
// threads spin for long and can take the core from working threads. `TeamSize` reacts to this.
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

// Work on fewer numbers is done by one thread, because waking others takes longer.
constexpr int64_t MIN_PARALLEL = 1 << 14;

// The number of threads of a team: as many as torch has, unless other processes use the cores. If
// the caller loses a quarter of its time, off its core or waiting for threads that are off theirs,
// the team gets one thread fewer. A team of two is reduced only if half of the time is lost,
// because a second thread at most doubles the speed. If less is lost, the team tries one more. Each
// failure makes the next attempt later.
class TeamSize {
    static constexpr double SAMPLE = 0.001;  // seconds between two calls that are measured
    static constexpr double WINDOW = 0.2;    // seconds of measured calls until the size can change
    static constexpr int64_t LONGEST_WAIT = 32;  // in windows
    int64_t most = 0;                            // torch's number of threads
    int64_t num_threads = 0;
    int64_t num_calm = 0;  // windows in which the team lost little
    int64_t wait = 1;      // calm windows until the team tries one more thread
    double start = 0;      // start of the measured call
    double end = 0;
    double cpu_time = 0;
    double measured = 0;  // seconds of the window
    double lost = 0;
    bool is_sampled = false;

    static double read(clockid_t clock) {
        timespec time;
        clock_gettime(clock, &time);
        return time.tv_sec + 1e-9 * time.tv_nsec;
    }

public:
    static TeamSize& get() {  // the calling thread's
        static thread_local TeamSize size;
        return size;
    }

    int64_t find() {
        int64_t num = omp_get_max_threads();
        if (num != most) {
            most = num;
            num_threads = num;
        }
        return num_threads;
    }

    // A call with one thread says nothing about sharing and is not measured.
    void begin(bool is_shared) {
        start = read(CLOCK_MONOTONIC);
        is_sampled = is_shared && most > 1 && start - end > SAMPLE;
        if (is_sampled) cpu_time = -read(CLOCK_THREAD_CPUTIME_ID);
    }

    // The caller has finished its share. From here on it may spin while it waits for others.
    void leave() {
        if (is_sampled) cpu_time += read(CLOCK_THREAD_CPUTIME_ID);
    }

    void finish() {
        if (!is_sampled) return;
        end = read(CLOCK_MONOTONIC);
        measured += end - start;
        lost += end - start - cpu_time;
        if (measured < WINDOW) return;
        double tolerated = num_threads == 2 ? 0.5 : 0.25;
        if (lost > tolerated * measured) {
            num_threads = std::max<int64_t>(num_threads - 1, 1);
            wait = std::min(4 * wait, LONGEST_WAIT);
            num_calm = 0;
            // Measurements with more threads say nothing about fewer.
            measured = 0;
            lost = 0;
        } else if (++num_calm >= wait) {
            num_threads = std::min(num_threads + 1, most);
            wait = std::max<int64_t>(wait / 2, 1);
            num_calm = 0;
        }
        measured /= 2;  // the past counts half, because one slow moment is not enough
        lost /= 2;
    }
};

class Team {
    static constexpr int64_t SPINS = 2000;
    alignas(64) std::atomic<int64_t> num_taken;  // tasks of the call
    alignas(64) std::atomic<int64_t> num_done;
    static inline thread_local Team* current = nullptr;  // the team of this thread during a call
    // Number of the call's tasks up to this parallel section.
    static inline thread_local int64_t end;

    static Team& own() {
        static thread_local Team team;
        return team;
    }

public:
    static inline thread_local int64_t num_threads;
    Buffer<float> memory;

    static Team& get() { return *current; }

    // Run work() on the threads of a new team. Within a team, run it on this thread, as all others
    // do.
    template <class Work>
    static void form(bool is_worth_it, const Work& work) {
        if (current) return work();
        Team& team = own();
        TeamSize& size = TeamSize::get();
        team.num_taken = 0;
        team.num_done = 0;
        size.begin(is_worth_it);
#pragma omp parallel num_threads(is_worth_it ? size.find() : 1)
        {
            current = &team;
            end = 0;
            num_threads = omp_get_num_threads();
            work();
            current = nullptr;
            if (omp_get_thread_num() == 0) size.leave();
        }
        size.finish();
    }

    // Run work() within a task. This thread computes everything that it shares.
    template <class Work>
    static void work_alone(const Work& work) {
        static thread_local Team alone;
        auto outer = std::tuple(current, end, num_threads);
        alone.num_taken = 0;
        alone.num_done = 0;
        current = &alone;
        end = 0;
        num_threads = 1;
        work();
        std::tie(current, end, num_threads) = outer;
    }

    // Run task(i) for every i below num_tasks, on any thread of the team.
    template <class Task>
    void share(int64_t num_tasks, const Task& task) {
        int64_t first = end;
        int64_t num = 0;  // tasks that this thread has run
        end += num_tasks;
        // Tasks are numbered through the whole call, and `next` is the first that no thread has
        // taken. A thread that is late finds it beyond `end`, because the others have taken all.
        int64_t next = num_taken;
        while (next < end) {
            // A failure means that another thread has taken it. Then `next` is read again.
            if (num_taken.compare_exchange_weak(next, next + 1)) {
                task(next - first);
                num++;
                next = num_taken;
            }
        }
        if (num > 0 && num_done.fetch_add(num) + num == end) num_done.notify_all();
        // Only tasks that other threads have taken are missing.
        int64_t done = num_done;
        for (int64_t spin = 0; done < end; spin++) {
            if (spin < SPINS)
                pause();
            else
                num_done.wait(done);
            done = num_done;
        }
    }

private:
    static void pause() {
#ifdef __x86_64__
        _mm_pause();
#endif
    }
};

// Run task(i) for every i below `num`. A task processes `size` numbers.
template <class Task>
static void parallel_for(int64_t num, int64_t size, const Task& task) {
    int64_t at_once = std::max<int64_t>(1, MIN_PARALLEL / 2 / size);
    Team::form(num * size > MIN_PARALLEL, [&] {
        Team::get().share((num + at_once - 1) / at_once, [&](int64_t first) {
            for (int64_t i = first * at_once; i < std::min(num, (first + 1) * at_once); i++)
                task(i);
        });
    });
}
