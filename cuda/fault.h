// Values that only the device sees (token ids, positions, block numbers) and that are out of range.
//
// A kernel that meets one reports it and leaves the value out; it never reads or writes outside its
// arrays. The report lies in the host's memory, and the next synchronize or download throws it.
#pragma once

#include <cstdint>

namespace kdt::cuda {

enum class FaultKind : int32_t {
  kNone,
  kTokenId,
  kRow,
  kPosition,
  kBlock,
  kParent,
  kLink,
  kSequence
};

struct Fault {
  int32_t kind;  // of FaultKind
  int32_t row;
  int32_t value;
};

}  // namespace kdt::cuda
