// Ranks of a group on threads of their own, for tests.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "parallel/rank_group.h"

namespace kdt::test {

using Ranks = std::vector<std::unique_ptr<RankGroup>>;

inline void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// body(group) on one thread a rank; what each threw ("" for none).
inline std::vector<std::string> run_ranks(const Ranks& ranks,
                                          const std::function<void(RankGroup&)>& body) {
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        body(*ranks[i]);
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Gathers, broadcasts and barriers of several sizes with ranks that come late at random. "" or what
// was wrong.
inline std::string exercise(RankGroup& group, int rounds, int max_delay_us) {
  std::mt19937 random(1000 + group.rank());
  const int size = group.size();
  for (int round = 0; round < rounds; ++round) {
    if (max_delay_us > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % max_delay_us));
    }
    const int count = (round * 37) % 300;
    std::vector<int> mine(count), all(static_cast<size_t>(count) * size, -1);
    for (int i = 0; i < count; ++i) mine[i] = group.rank() * 1000003 + round * 1009 + i;
    group.all_gather(mine.data(), count * sizeof(int), all.data());
    for (int rank = 0; rank < size; ++rank) {
      for (int i = 0; i < count; ++i) {
        if (all[rank * count + i] != rank * 1000003 + round * 1009 + i) return "wrong gather";
      }
    }
    // In place, and at once, so that a rank is late in reading what another writes anew.
    std::vector<int> places(size, -1);
    places[group.rank()] = round + group.rank();
    group.all_gather(&places[group.rank()], sizeof(int), places.data());
    for (int rank = 0; rank < size; ++rank) {
      if (places[rank] != round + rank) return "wrong gather in place";
    }
    int64_t word[3] = {round, group.rank(), 7};
    group.broadcast(word, sizeof(word));
    if (word[0] != round || word[1] != 0 || word[2] != 7) return "wrong broadcast";
    word[0] = group.rank() == 0 ? 5 - round : 0;
    group.wait_for_leader(word, sizeof(word));
    if (word[0] != 5 - round) return "wrong word of the leader";
    group.barrier();
  }
  return "";
}

inline bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace kdt::test
