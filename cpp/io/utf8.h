#pragma once

#include <string_view>

namespace kdt {

// Whether every sequence is complete, shortest-form and no surrogate (Unicode 15, table 3-7).
bool is_utf8(std::string_view text);

}  // namespace kdt
