#include "parallel/launch.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "core/error.h"

namespace kdt {
namespace {

constexpr int kMostRanks = 1024;

std::string text(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool is_set(const char* name) { return !text(name).empty(); }

int number(const char* name, int least, int most) {
  const std::string value = text(name);
  KDT_CHECK_ARGUMENT(!value.empty(), name,
                     " is not set, but other variables of the launcher are: set it too, or none");
  int result = 0;
  const char* end = value.data() + value.size();
  const auto [at, error] = std::from_chars(value.data(), end, result);
  KDT_CHECK_ARGUMENT(error == std::errc() && at == end && result >= least && result <= most, name,
                     " is \"", value, "\"; it must be a number from ", least, " to ", most);
  return result;
}

// The count of the given node in "2(x3),1".
int tasks_of_node(const char* name, int node) {
  const std::string value = text(name);
  std::string_view rest = value;
  const auto take_number = [&](int& to) {
    const auto [at, error] = std::from_chars(rest.data(), rest.data() + rest.size(), to);
    rest.remove_prefix(at - rest.data());
    return error == std::errc() && to > 0;
  };
  const auto take = [&](std::string_view word) {
    if (!rest.starts_with(word)) return false;
    rest.remove_prefix(word.size());
    return true;
  };
  while (true) {
    int tasks = 0, nodes = 1;
    if (!take_number(tasks)) break;
    if (take("(x") && !(take_number(nodes) && take(")"))) break;
    if (node < nodes) return tasks;
    node -= nodes;
    if (!take(",")) break;
  }
  throw std::invalid_argument(join(name, " is \"", value,
                                   "\"; it must tell the tasks of each node, as in \"2(x3),1\", ",
                                   "and SLURM_NODEID be one of them"));
}

struct Names {
  const char *rank, *size, *local_rank, *local_size;
};

void read_ranks(const Names& names, Launch& launch) {
  launch.world_size = number(names.size, 1, kMostRanks);
  launch.rank = number(names.rank, 0, launch.world_size - 1);
  if (!is_set(names.local_rank) && !is_set(names.local_size)) return;
  launch.local_size = number(names.local_size, 1, launch.world_size);
  launch.local_rank = number(names.local_rank, 0, launch.local_size - 1);
}

void read_step(Launch& launch) {
  const char* size = is_set("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  launch.world_size = number(size, 1, kMostRanks);
  launch.rank = number("SLURM_PROCID", 0, launch.world_size - 1);
  const int node = number("SLURM_NODEID", 0, kMostRanks);
  launch.local_size = tasks_of_node("SLURM_STEP_TASKS_PER_NODE", node);
  KDT_CHECK_ARGUMENT(launch.local_size <= launch.world_size, "SLURM_STEP_TASKS_PER_NODE is \"",
                     text("SLURM_STEP_TASKS_PER_NODE"), "\", but ", size, " is \"", text(size),
                     "\"");
  launch.local_rank = number("SLURM_LOCALID", 0, launch.local_size - 1);
}

std::string job_key() {
  if (is_set("KDTREE_GROUP_KEY")) {
    const std::string key = text("KDTREE_GROUP_KEY");
    KDT_CHECK_ARGUMENT(key.size() <= kLongestKey, "KDTREE_GROUP_KEY has ", key.size(),
                       " bytes; at most ", kLongestKey, " are possible");
    return key;
  }
  std::string key = text("TORCHELASTIC_RUN_ID");
  if (key.empty()) key = text("PMIX_NAMESPACE");
  if (key.empty() && is_set("SLURM_JOB_ID")) {
    key = text("SLURM_JOB_ID") + "." + text("SLURM_STEP_ID");
  }
  return key.substr(0, kLongestKey);
}

}  // namespace

Launch launch_from_environment() {
  Launch launch;
  if (is_set("RANK") || is_set("WORLD_SIZE")) {
    read_ranks({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, launch);
  } else if (is_set("OMPI_COMM_WORLD_RANK") || is_set("OMPI_COMM_WORLD_SIZE")) {
    read_ranks({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"},
               launch);
  } else if (is_set("SLURM_PROCID") && is_set("SLURM_STEP_ID")) {
    // A batch script has a SLURM_PROCID too, though it is not one of the tasks.
    read_step(launch);
  }
  if (launch.world_size == 1) return launch;
  launch.master_addr = text("MASTER_ADDR");
  KDT_CHECK_ARGUMENT(!launch.master_addr.empty(), "MASTER_ADDR is not set: this is process ",
                     launch.rank, " of ", launch.world_size,
                     ", and all need the host name or address of process 0 there (and may agree on"
                     " a MASTER_PORT other than ",
                     launch.master_port, ")");
  if (is_set("MASTER_PORT")) launch.master_port = number("MASTER_PORT", 1, 65535 - kGroupPorts);
  launch.key = job_key();
  return launch;
}

}  // namespace kdt
