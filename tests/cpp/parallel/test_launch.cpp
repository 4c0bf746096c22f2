// What launchers put into the environment.
#include <cstdlib>
#include <map>

#include "check.h"
#include "parallel/launch.h"

namespace kdt::test {
namespace {

using Variables = std::map<std::string, std::string>;

Launch with(const Variables& variables) {
  for (const char* name : {"RANK",
                           "WORLD_SIZE",
                           "LOCAL_RANK",
                           "LOCAL_WORLD_SIZE",
                           "MASTER_ADDR",
                           "MASTER_PORT",
                           "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_RANK",
                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                           "SLURM_PROCID",
                           "SLURM_NTASKS",
                           "SLURM_LOCALID",
                           "SLURM_NODEID",
                           "SLURM_STEP_ID",
                           "SLURM_STEP_NUM_TASKS",
                           "SLURM_STEP_TASKS_PER_NODE",
                           "SLURM_JOB_ID",
                           "KDTREE_GROUP_KEY",
                           "TORCHELASTIC_RUN_ID",
                           "PMIX_NAMESPACE"}) {
    unsetenv(name);
  }
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  return launch_from_environment();
}

Variables changed(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node-a"},
                             {"MASTER_PORT", "41000"},
                             {"TORCHELASTIC_RUN_ID", "job-7"}};
const Variables kMpirun = {{"OMPI_COMM_WORLD_RANK", "3"},       {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                           {"PMIX_NAMESPACE", "prterun-9"},     {"MASTER_ADDR", "10.0.0.1"}};
const Variables kSrun = {{"SLURM_PROCID", "6"},   {"SLURM_NTASKS", "7"},
                         {"SLURM_LOCALID", "0"},  {"SLURM_NODEID", "3"},
                         {"SLURM_STEP_ID", "2"},  {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                         {"SLURM_JOB_ID", "812"}, {"MASTER_ADDR", "fe80::1"}};

KDT_TEST(alone) {
  const Launch launch = with({});
  EXPECT_EQ(launch.world_size, 1);
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.local_size, 1);
  EXPECT_EQ(with({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).world_size, 1);
  EXPECT_EQ(with({{"RANK", ""}, {"WORLD_SIZE", ""}}).world_size, 1);
  // A script of a Slurm job is no task of it.
  EXPECT_EQ(with({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).world_size, 1);
}

KDT_TEST(torchrun) {
  Launch launch = with(kTorchrun);
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world_size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 4);
  EXPECT_EQ(launch.master_addr, "node-a");
  EXPECT_EQ(launch.master_port, 41000);
  EXPECT_EQ(launch.key, "job-7");
  launch = with({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}});
  EXPECT_EQ(launch.local_rank, 0);
  EXPECT_EQ(launch.local_size, 1);
  EXPECT_EQ(launch.master_port, 29500);
}

KDT_TEST(mpirun) {
  const Launch launch = with(kMpirun);
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 2);
  EXPECT_EQ(launch.master_addr, "10.0.0.1");
  EXPECT_EQ(launch.key, "prterun-9");
}

KDT_TEST(srun) {
  Launch launch = with(kSrun);
  EXPECT_EQ(launch.rank, 6);
  EXPECT_EQ(launch.world_size, 7);
  EXPECT_EQ(launch.local_rank, 0);
  EXPECT_EQ(launch.local_size, 1);
  EXPECT_EQ(launch.master_addr, "fe80::1");
  EXPECT_EQ(launch.key, "812.2");
  Variables second = kSrun;
  second["SLURM_NODEID"] = "2";
  second["SLURM_LOCALID"] = "1";
  second["SLURM_STEP_NUM_TASKS"] = "7";
  second["SLURM_NTASKS"] = "64";  // of the job
  launch = with(second);
  EXPECT_EQ(launch.world_size, 7);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 2);
}

KDT_TEST(torchrun_started_by_srun_or_mpirun) {
  Variables all = kTorchrun;
  all.insert(kMpirun.begin(), kMpirun.end());
  all.insert(kSrun.begin(), kSrun.end());
  EXPECT_EQ(with(all).rank, 5);
  Variables two = kMpirun;
  two.insert(kSrun.begin(), kSrun.end());
  EXPECT_EQ(with(two).rank, 3);
}

KDT_TEST(own_key) {
  EXPECT_EQ(with(changed(kTorchrun, "KDTREE_GROUP_KEY", "mine")).key, "mine");
  EXPECT_THROWS("KDTREE_GROUP_KEY has 256 bytes",
                with(changed(kTorchrun, "KDTREE_GROUP_KEY", std::string(256, 'k'))));
  EXPECT_EQ(with(changed(kTorchrun, "TORCHELASTIC_RUN_ID", std::string(999, 'k'))).key.size(),
            size_t{kLongestKey});
}

KDT_TEST(bad_values) {
  for (const char* bad : {"eight", "8x", " 8", "0x8", "-1", "9999999999999999999", "8.0", "0"}) {
    EXPECT_THROWS(std::string("WORLD_SIZE is \"") + bad + "\"; it must be a number from 1 to 1024",
                  with(changed(kTorchrun, "WORLD_SIZE", bad)));
  }
  EXPECT_THROWS("RANK is \"8\"; it must be a number from 0 to 7",
                with(changed(kTorchrun, "RANK", "8")));
  EXPECT_THROWS("RANK is not set, but", with(changed(kTorchrun, "RANK", "")));
  EXPECT_THROWS("WORLD_SIZE is not set, but", with(changed(kTorchrun, "WORLD_SIZE", "")));
  EXPECT_THROWS("LOCAL_RANK is \"4\"", with(changed(kTorchrun, "LOCAL_RANK", "4")));
  EXPECT_THROWS("LOCAL_WORLD_SIZE is \"9\"", with(changed(kTorchrun, "LOCAL_WORLD_SIZE", "9")));
  EXPECT_THROWS("LOCAL_WORLD_SIZE is not set", with(changed(kTorchrun, "LOCAL_WORLD_SIZE", "")));
  EXPECT_THROWS("MASTER_PORT is \"65530\"; it must be a number from 1 to 65527",
                with(changed(kTorchrun, "MASTER_PORT", "65530")));
  EXPECT_THROWS("MASTER_ADDR is not set: this is process 5 of 8",
                with(changed(kTorchrun, "MASTER_ADDR", "")));
  EXPECT_THROWS("MASTER_ADDR is not set: this is process 3 of 4",
                with(changed(kMpirun, "MASTER_ADDR", "")));
  EXPECT_THROWS("OMPI_COMM_WORLD_SIZE is \"-4\"",
                with(changed(kMpirun, "OMPI_COMM_WORLD_SIZE", "-4")));
  EXPECT_THROWS("SLURM_PROCID is \"7\"", with(changed(kSrun, "SLURM_PROCID", "7")));
  EXPECT_THROWS("SLURM_LOCALID is \"1\"", with(changed(kSrun, "SLURM_LOCALID", "1")));
  for (const char* bad : {"", "2(x3", "x", "2(x3)1", "2,", "0,0,0,0", "2(x0),1", "2(x2),1",
                          "99999999999", "2(y3),1"}) {
    EXPECT_THROWS(std::string("SLURM_STEP_TASKS_PER_NODE is \"") + bad + "\"",
                  with(changed(kSrun, "SLURM_STEP_TASKS_PER_NODE", bad)));
  }
  EXPECT_THROWS("SLURM_STEP_TASKS_PER_NODE is \"8(x4)\", but SLURM_NTASKS is \"7\"",
                with(changed(kSrun, "SLURM_STEP_TASKS_PER_NODE", "8(x4)")));
}

}  // namespace
}  // namespace kdt::test

KDT_TEST_MAIN
