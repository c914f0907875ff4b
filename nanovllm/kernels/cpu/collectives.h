// Collectives of ranks on one machine, through shared memory. On virtual machines a collective of
// torch.distributed can take longer than a decoder layer.
//
// Every rank writes its part and waits until all ranks have written theirs. There are two sets of
// parts, used alternately: a rank that reaches a round has read all parts of the previous one.
#pragma once
#include <atomic>
#include <sched.h>
#include <signal.h>

#include "team.h"

struct Shared {  // followed in memory by two sets of one part per rank
    static constexpr int64_t MAX_RANKS = 64, PART_BYTES = 1 << 20;
    struct alignas(64) Rank {
        std::atomic<int64_t> round;
        int64_t pid;
    } ranks[MAX_RANKS];
};

struct Member {
    Shared* shared;
    int64_t rank, size, round, is_lost;  // is_lost: another rank has exited

    T* part(int64_t other) const {
        return reinterpret_cast<T*>(reinterpret_cast<char*>(shared + 1) +
                                    (round % 2 * size + other) * Shared::PART_BYTES);
    }

    // Wait until all ranks have written their parts.
    void barrier() {
        int64_t next = round + 1;
        shared->ranks[rank].round.store(next, std::memory_order_release);
        for (int64_t other = 0; other < size && !is_lost; other++)
            for (int64_t turn = 1;
                 shared->ranks[other].round.load(std::memory_order_acquire) < next && !is_lost;
                 turn++) {
                sched_yield();
                if (turn % 1000 == 0) is_lost = kill(shared->ranks[other].pid, 0);
            }
    }
};

// Sum x [size] over all ranks in place, in float and in the order of the ranks, so that the result
// is bitwise identical on all.
extern "C" void all_reduce(Member* member, T* x, int64_t size) {
    constexpr int64_t PART = Shared::PART_BYTES / sizeof(T), BLOCK = 512;
    Team::form(size > MIN_PARALLEL, [&] {
        Team& team = Team::get();
        for (int64_t first = 0; first < size; first += PART) {
            int64_t end = std::min(first + PART, size);
            team.share(1, [&](int64_t) {
                std::copy(x + first, x + end, member->part(member->rank));
                member->barrier();
            });
            parallel_for((end - first + BLOCK - 1) / BLOCK, BLOCK, [&](int64_t block) {
                float sums[BLOCK] = {};
                int64_t start = first + block * BLOCK, num = std::min(BLOCK, end - start);
                for (int64_t other = 0; other < member->size; other++) {
                    const T* part = member->part(other) + start - first;
                    for (int64_t i = 0; i < num; i++) sums[i] += part[i];
                }
                for (int64_t i = 0; i < num; i++) x[start + i] = sums[i];
            });
            team.share(1, [&](int64_t) { member->round++; });
        }
    });
}

// Write the rows of all ranks' x [num_rows, num_columns] side by side to `output` on rank 0.
extern "C" void gather(Member* member, const T* x, T* output, int64_t num_rows,
                       int64_t num_columns) {
    constexpr int64_t PART = Shared::PART_BYTES / sizeof(T);
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t first = 0; first < num_columns; first += PART, member->round++) {
            int64_t size = std::min(PART, num_columns - first);
            if (member->rank)
                std::copy_n(x + row * num_columns + first, size, member->part(member->rank));
            member->barrier();
            if (!member->rank)
                for (int64_t other = 0; other < member->size; other++) {
                    const T* from = other ? member->part(other) : x + row * num_columns + first;
                    std::copy_n(from, size,
                                output + (row * member->size + other) * num_columns + first);
                }
        }
}
