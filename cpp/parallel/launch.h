// How this process was started: alone, or as one of several by torchrun, mpirun or srun.
#pragma once

#include <string>

namespace kdt {

struct Launch {
  int rank = 0;        // of this process
  int world_size = 1;  // processes
  int local_rank = 0;  // among those of its node
  int local_size = 1;
  std::string master_addr;  // of rank 0; needed when there are several processes
  int master_port = 29500;  // rank 0 listens on one of the kGroupPorts ports after it
  std::string key;          // processes with another key belong to another job
};

// torchrun itself listens on MASTER_PORT, so that one is never ours.
inline constexpr int kGroupPorts = 8;
inline constexpr int kLongestKey = 255;

// From the first of these that is set:
//   torchrun  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (one process a node without them)
//   mpirun    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE (Open MPI)
//   srun      SLURM_PROCID in a step (SLURM_STEP_ID), SLURM_STEP_NUM_TASKS or SLURM_NTASKS,
//             SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE
// and MASTER_ADDR, MASTER_PORT; of these torchrun alone sets both. The key is KDTREE_GROUP_KEY, or
// else the id which the launcher gave to the job. Without any of them the process is alone.
// Throws std::invalid_argument naming the variable and its value.
Launch launch_from_environment();

}  // namespace kdt
