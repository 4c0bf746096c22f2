// Tables of the rotary embedding, plain and yarn.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace kdt {

// [positions, rotary_dim]: rotary_dim / 2 cosines, then as many sines, yarn's multiplier included.
std::vector<float> rope_table(const RopeConfig& config, int64_t rotary_dim, int64_t positions);

// What yarn multiplies the softmax scale of DeepSeek's attention by; 1 without yarn.
double yarn_softmax_factor(const RopeConfig& config);

}  // namespace kdt
