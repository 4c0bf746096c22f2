#include "cpu/cpu_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace kdt::cpu {

std::shared_ptr<void> map_zeroed(int64_t bytes) {
  KDT_CHECK(bytes >= 0, "allocate: ", bytes, " bytes");
  const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  KDT_CHECK(memory != MAP_FAILED, "allocate: no memory for ", bytes, " bytes");
  // A system without large pages ignores this.
  if (size >= size_t{2} << 20) madvise(memory, size, MADV_HUGEPAGE);
  return std::shared_ptr<void>(memory, [size](void* p) { munmap(p, size); });
}

std::shared_ptr<void> Arena::allocate(int64_t bytes) {
  constexpr int64_t kChunkBytes = int64_t{32} << 20;
  KDT_CHECK(bytes >= 0, "allocate: ", bytes, " bytes");
  const int64_t size = ceil_div(std::max<int64_t>(bytes, 1), 64) * 64;
  if (size > kChunkBytes / 8) return map_zeroed(size);
  if (used_bytes_ + size > chunk_bytes_) {
    chunk_ = map_zeroed(kChunkBytes);
    chunk_bytes_ = kChunkBytes;
    used_bytes_ = 0;
  }
  std::shared_ptr<void> piece(chunk_, static_cast<char*>(chunk_.get()) + used_bytes_);
  used_bytes_ += size;
  return piece;
}

CpuBackend::CpuBackend(int num_threads, const Kernels& kernels)
    : kernels_(kernels), pool_(num_threads), scratch_(num_threads) {}

Buffer CpuBackend::allocate(DType dtype, std::initializer_list<int64_t> shape) {
  Buffer buffer;
  const Tensor sizes(nullptr, dtype, shape);
  buffer.memory = map_zeroed(sizes.bytes());
  buffer.tensor = Tensor(buffer.memory.get(), dtype, shape);
  return buffer;
}

void CpuBackend::upload(const Tensor& to, const void* from) {
  if (to.bytes() > 0) std::memcpy(to.raw(), from, to.bytes());
}

void CpuBackend::download(void* to, const Tensor& from) {
  if (from.bytes() > 0) std::memcpy(to, from.raw(), from.bytes());
}

namespace {

std::unique_ptr<KvCache> make_cache(int64_t num_layers, int64_t num_blocks, int64_t block_size,
                                    int64_t num_groups, int64_t key_dim, int64_t value_dim) {
  KDT_CHECK(num_layers > 0 && num_blocks > 0 && num_groups > 0 && key_dim > 0 && value_dim > 0,
            "cache: a size is not positive");
  KDT_CHECK(block_size > 0 && block_size % kPanel == 0, "cache: block_size ", block_size,
            " is not a multiple of ", kPanel);
  auto cache = std::make_unique<CpuKvCache>();
  cache->num_layers = num_layers;
  cache->num_blocks = num_blocks;
  cache->block_size = block_size;
  cache->num_groups = num_groups;
  cache->key_dim = key_dim;
  cache->value_dim = value_dim;
  cache->value_stride = ceil_div(value_dim, kPanel) * kPanel;
  cache->group_floats = block_size * (key_dim + cache->value_stride);
  cache->block_floats = num_groups * cache->group_floats;
  KDT_CHECK(!__builtin_mul_overflow(num_blocks, cache->block_floats, &cache->layer_floats),
            "cache: ", num_blocks, " blocks of ", cache->block_floats,
            " values are more than memory can hold");
  int64_t bytes = 0;
  KDT_CHECK(!__builtin_mul_overflow(num_layers, cache->layer_floats, &bytes) &&
                !__builtin_mul_overflow(bytes, static_cast<int64_t>(sizeof(float)), &bytes),
            "cache: ", num_layers, " layers of ", cache->layer_floats,
            " values are more than memory can hold");
  cache->memory = map_zeroed(bytes);
  return cache;
}

}  // namespace

std::unique_ptr<KvCache> CpuBackend::make_mla_cache(int64_t num_layers, int64_t num_blocks,
                                                    int64_t block_size, int64_t kv_lora_rank,
                                                    int64_t rope_dim) {
  return make_cache(num_layers, num_blocks, block_size, 1, kv_lora_rank + rope_dim, kv_lora_rank);
}

std::unique_ptr<KvCache> CpuBackend::make_gqa_cache(int64_t num_layers, int64_t num_blocks,
                                                    int64_t block_size, int64_t kv_heads,
                                                    int64_t head_dim) {
  return make_cache(num_layers, num_blocks, block_size, kv_heads, head_dim, head_dim);
}

std::unique_ptr<Backend> make_cpu_backend(int num_threads) {
  return std::make_unique<CpuBackend>(num_threads, select_kernels());
}

}  // namespace kdt::cpu
