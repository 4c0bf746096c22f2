#include "io/utf8.h"

#include <cstddef>
#include <cstdint>

namespace kdt {

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t at) { return static_cast<uint8_t>(text[at]); };
    const uint8_t lead = byte(i++);
    if (lead < 0x80) continue;
    const size_t more = lead >= 0xC2 && lead < 0xE0 ? 1 : lead >= 0xE0 && lead < 0xF0 ? 2 : 3;
    if (lead < 0xC2 || lead > 0xF4 || text.size() - i < more) return false;
    // The second byte has a narrower range after these leads.
    const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(i) < low || byte(i) > high) return false;
    for (size_t k = 1; k < more; ++k) {
      if ((byte(i + k) & 0xC0) != 0x80) return false;
    }
    i += more;
  }
  return true;
}

}  // namespace kdt
