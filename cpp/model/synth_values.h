// The values of generated tensors: each is picked by a counter's hash from a table.
#pragma once

#include <cstdint>
#include <vector>

namespace kdt {

struct SynthRecipe {
  enum class Kind {
    kTable,    // each value one of 4096, all equally likely
    kInt4,     // groups of 32 codes from -7 to 7, one of them -7 or 7; each byte one of 4096
    kLiteral,  // these bytes
  };
  Kind kind = Kind::kLiteral;
  int value_bytes = 1;  // of kTable: 1, 2 or 4
  std::vector<uint8_t> bytes;
};

// Normally distributed.
SynthRecipe normal_bf16(double mean, double deviation);
SynthRecipe normal_f32(double mean, double deviation);
// Codes whose weights have a standard deviation of 1 when their scales are scales_...(..._unit()).
SynthRecipe int4_codes();
SynthRecipe fp8_codes();  // e4m3
double int4_unit();
double fp8_unit();
// Uniform between 3/4 and 5/4 of their root mean square, `size`.
SynthRecipe scales_bf16(double size);
SynthRecipe scales_f32(double size);

// Bytes `begin` to `end` of the tensor that `recipe` and `key` make.
void make_synth_bytes(const SynthRecipe& recipe, uint64_t key, uint64_t begin, uint64_t end,
                      uint8_t* out);

}  // namespace kdt
