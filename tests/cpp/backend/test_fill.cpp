// Weights that are filled from slices, part by part, or from the memory of others.
#include <thread>

#include "op_test.h"

namespace kdt::test {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kInt32};

// Rows and columns of a matrix.
struct Part {
  int64_t row, rows, column, columns;
};

// Bytes of so many values of a row.
int64_t row_bytes(DType dtype, int64_t columns) {
  return HostMatrix{.dtype = dtype, .in_features = columns}.row_bytes();
}

// The part where it lies: rows keep the whole matrix's distance.
HostMatrix slice_of(const Matrix& m, const Part& part) {
  HostMatrix host = m.host();
  host.row_stride = row_bytes(m.dtype, m.in);
  host.scale_row_stride = m.in / 32 * 2;
  host.data += part.row * host.row_stride + row_bytes(m.dtype, part.column);
  if (host.scale != nullptr) host.scale += part.row * host.scale_row_stride + part.column / 32 * 2;
  host.out_features = part.rows;
  host.in_features = part.columns;
  return host;
}

// The part in a matrix of its own.
Matrix cut(const Matrix& m, const Part& part) {
  Matrix to{m.dtype, part.rows, part.columns, {}, {}, {}};
  const auto copy = [&](auto& into, const auto& from, int64_t stride, int64_t at, int64_t count) {
    for (int64_t r = part.row; r < part.row + part.rows; ++r)
      append(into, slice(from, r * stride + at, count));
  };
  copy(to.data, m.data, row_bytes(m.dtype, m.in), row_bytes(m.dtype, part.column),
       row_bytes(m.dtype, part.columns));
  copy(to.values, m.values, m.in, part.column, part.columns);
  if (m.dtype == DType::kInt32)
    copy(to.scale, m.scale, m.in / 16, part.column / 16, part.columns / 16);
  return to;
}

// The same bytes at odd addresses.
struct Unaligned {
  explicit Unaligned(const HostMatrix& from) : host(from) {
    const auto shift = [](Bytes& to, const uint8_t* begin, int64_t bytes) {
      to.resize(bytes + 2);
      uint8_t* at = to.data() + (reinterpret_cast<uintptr_t>(to.data()) % 2 == 0 ? 1 : 0);
      std::memcpy(at, begin, bytes);
      return at;
    };
    const int64_t last = from.out_features - 1;
    host.data = shift(data, from.data, from.row(last) - from.data + from.row_bytes());
    if (from.scale != nullptr)
      host.scale =
          shift(scale, from.scale, from.scale_row(last) - from.scale + from.in_features / 16);
  }
  Bytes data, scale;
  HostMatrix host;
};

Bytes bytes_of(Backend& b, const std::vector<Tensor>& memory) {
  Bytes all;
  for (const Tensor& tensor : memory) {
    EXPECT(tensor.dtype() == DType::kUInt8);
    Bytes bytes(tensor.bytes());
    b.download(bytes.data(), tensor);
    append(all, bytes);
  }
  return all;
}

void write_memory(Backend& b, const std::vector<Tensor>& memory, const Bytes& bytes) {
  int64_t at = 0;
  for (const Tensor& tensor : memory) {
    b.upload(tensor, bytes.data() + at);
    at += tensor.bytes();
  }
  EXPECT_EQ(at, static_cast<int64_t>(bytes.size()));
}

Floats run_linear(Backend& b, const Floats& x, int64_t rows, const LinearWeight& weight) {
  const Buffer out = output(b, {rows, weight.out_features});
  b.linear(upload(b, x, {rows, weight.in_features}).tensor, weight, out.tensor);
  return download(b, out.tensor);
}

struct RandomExpert {
  RandomExpert(DType gate_up, DType down_dtype, int64_t hidden, int64_t inter, uint64_t seed)
      : gate(random_matrix(gate_up, inter, hidden, seed)),
        up(random_matrix(gate_up, inter, hidden, seed + 1)),
        down(random_matrix(down_dtype, hidden, inter, seed + 2)) {}
  HostExpert host() const { return {gate.host(), up.host(), down.host()}; }
  Matrix gate, up, down;
};

// Token t takes experts t and t + 1.
Floats run_experts(Backend& b, const Floats& x, int64_t rows, const ExpertsWeight& experts) {
  Ints ids;
  Floats weights;
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t k = 0; k < 2; ++k) {
      ids.push_back(static_cast<int32_t>((t + k) % experts.num_experts));
      weights.push_back(k == 0 ? 0.75f : 0.5f);
    }
  }
  const Buffer out = upload(b, Floats(x.size(), 0.0f), {rows, experts.hidden_size});
  const Buffer x_memory = upload(b, x, {rows, experts.hidden_size});
  const Buffer id_memory = upload(b, ids, {rows, 2}), weight_memory = upload(b, weights, {rows, 2});
  b.moe_experts({.x = x_memory.tensor,
                 .ids = id_memory.tensor,
                 .weights = weight_memory.tensor,
                 .experts = &experts,
                 .out = out.tensor});
  return download(b, out.tensor);
}

KDT_TEST(a_slice_is_the_matrix_cut_by_hand) {
  Backend& b = backend();
  for (DType dtype : kDTypes) {
    const Matrix whole = random_matrix(dtype, 83, 224, 1);
    std::vector<Part> parts = {{0, 83, 0, 224},  {17, 1, 0, 224},  {5, 64, 0, 224},
                               {0, 83, 96, 128}, {0, 83, 192, 32}, {41, 33, 32, 160}};
    if (dtype != DType::kInt32) parts.push_back({3, 35, 7, 101});
    for (const Part& part : parts) {
      const Unaligned host(slice_of(whole, part));
      const Matrix by_hand = cut(whole, part);
      const auto weight = b.prepare_linear({host.host}),
                 expected = b.prepare_linear({by_hand.host()});
      EXPECT(same_bits(bytes_of(b, weight->memory()), bytes_of(b, expected->memory())));
      const Floats x = to_bf16_values(Random(2).floats(9 * part.columns));
      const Floats result = run_linear(b, x, 9, *weight);
      EXPECT(same_bits(result, run_linear(b, x, 9, *expected)));
      EXPECT(max_error(result, product(x, by_hand)) < 5e-5);
    }
    // Slices of several matrices in one weight.
    const Matrix other = random_matrix(dtype, 64, 288, 3);
    const Part first{11, 40, 64, 96}, second{1, 7, 160, 96};
    const auto stacked = b.prepare_linear({slice_of(whole, first), slice_of(other, second)}),
               expected = b.prepare_linear({cut(whole, first).host(), cut(other, second).host()});
    EXPECT(same_bits(bytes_of(b, stacked->memory()), bytes_of(b, expected->memory())));
  }
}

KDT_TEST(memory_is_all_of_a_linear_weight) {
  Backend& b = backend();
  EXPECT(b.weight_layout() == (on_cpu() ? "cpu-panels-1" : "cuda-stripes-1"));
  for (DType dtype : kDTypes) {
    for (const std::vector<int64_t>& rows : {std::vector<int64_t>{45}, {33, 1, 64}, {40, 40, 40}}) {
      std::vector<Matrix> matrices, others;
      std::vector<HostMatrix> hosts, other_hosts;
      std::vector<MatrixShape> shapes;
      for (int64_t out : rows) {
        matrices.push_back(random_matrix(dtype, out, 96, out));
        others.push_back(random_matrix(dtype, out, 96, out + 1));
        shapes.push_back({out, 96, dtype});
      }
      for (const Matrix& m : matrices) hosts.push_back(m.host());
      for (const Matrix& m : others) other_hosts.push_back(m.host());
      const auto weight = b.prepare_linear(hosts), copy = b.make_linear(shapes);
      const Bytes bytes = bytes_of(b, weight->memory());
      EXPECT_EQ(weight->memory().size(), copy->memory().size());
      for (size_t i = 0; i < copy->memory().size(); ++i)
        EXPECT_EQ(weight->memory()[i].bytes(), copy->memory()[i].bytes());
      write_memory(b, copy->memory(), bytes);
      const Floats x = Random(2).floats(5 * 96);
      EXPECT(same_bits(run_linear(b, x, 5, *copy), run_linear(b, x, 5, *weight)));
      // Nothing of what a weight held before stays.
      b.fill_linear(*copy, other_hosts);
      EXPECT(!same_bits(bytes_of(b, copy->memory()), bytes));
      b.fill_linear(*copy, hosts);
      EXPECT(same_bits(bytes_of(b, copy->memory()), bytes));
    }
  }
}

KDT_TEST(experts_are_filled_in_any_order) {
  Backend& b = backend();
  constexpr int64_t kExperts = 5, kHidden = 96, kInter = 64, kRows = 7;
  for (DType gate_up : kDTypes) {
    for (DType down : kDTypes) {
      const ExpertsShape shape{kExperts, kHidden, kInter, gate_up, down};
      if (!on_cpu() && (gate_up == DType::kFloat32) != (down == DType::kFloat32)) {
        EXPECT_THROWS("make_experts: gate and up of ", b.make_experts(shape));
        continue;
      }
      std::vector<RandomExpert> experts;
      std::vector<HostExpert> hosts;
      for (int64_t e = 0; e < kExperts; ++e)
        experts.emplace_back(gate_up, down, kHidden, kInter, 10 * e);
      for (const RandomExpert& expert : experts) hosts.push_back(expert.host());
      const auto expected = b.prepare_experts(hosts), weight = b.make_experts(shape),
                 copy = b.make_experts(shape);
      EXPECT_EQ(weight->num_experts, kExperts);
      EXPECT_EQ(weight->hidden_size, kHidden);
      EXPECT_EQ(weight->intermediate_size, kInter);
      for (int64_t e : {3, 0, 4, 2, 1}) b.fill_expert(*weight, e, hosts[e]);
      const Bytes bytes = bytes_of(b, expected->memory());
      EXPECT(same_bits(bytes_of(b, weight->memory()), bytes));
      write_memory(b, copy->memory(), bytes);
      const Floats x = Random(3).floats(kRows * kHidden, 0.5f);
      const Floats result = run_experts(b, x, kRows, *expected);
      EXPECT(same_bits(run_experts(b, x, kRows, *weight), result));
      EXPECT(same_bits(run_experts(b, x, kRows, *copy), result));
      // One expert alone, and nothing of what was there before.
      b.fill_expert(*weight, 3, hosts[1]);
      EXPECT(!same_bits(bytes_of(b, weight->memory()), bytes));
      b.fill_expert(*weight, 3, hosts[3]);
      EXPECT(same_bits(bytes_of(b, weight->memory()), bytes));
    }
  }
}

// Scales that tell groups from one another.
Matrix with_group_scales(int64_t out, int64_t in, uint64_t seed) {
  Matrix m = random_matrix(DType::kInt32, out, in, seed);
  const int64_t groups = in / 32;
  for (int64_t i = 0; i < out * groups; ++i) {
    uint16_t bits;
    std::memcpy(&bits, m.scale.data() + 2 * i, 2);
    const double before = bf16_to_float(bits);
    bits = float_to_bf16(static_cast<float>(i % groups + 1) / 64);
    std::memcpy(m.scale.data() + 2 * i, &bits, 2);
    for (int64_t k = 0; k < 32; ++k) m.values[i * 32 + k] *= bf16_to_float(bits) / before;
  }
  return m;
}

// Each rank's columns alone, added up, are the whole product.
KDT_TEST(column_slices_add_up) {
  Backend& b = backend();
  constexpr int64_t kOut = 48, kIn = 2048, kRows = 3;
  const Matrix whole = with_group_scales(kOut, kIn, 1);
  const Floats x = to_bf16_values(Random(2).floats(kRows * kIn));
  const std::vector<double> expected = product(x, whole);
  EXPECT(
      relative_error(run_linear(b, x, kRows, *b.prepare_linear({whole.host()})), expected).worst <
      1e-5);
  for (int64_t ranks : {2, 4, 8}) {
    const int64_t columns = kIn / ranks;
    std::vector<double> sum(kRows * kOut, 0.0);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Floats part;
      for (int64_t r = 0; r < kRows; ++r) append(part, slice(x, r * kIn + rank * columns, columns));
      const auto weight = b.prepare_linear({slice_of(whole, {0, kOut, rank * columns, columns})});
      const Floats result = run_linear(b, part, kRows, *weight);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += result[i];
    }
    EXPECT(relative_error(sum, expected).worst < 1e-5);
  }
}

KDT_TEST(slices_of_experts_add_up) {
  Backend& b = backend();
  constexpr int64_t kExperts = 3, kHidden = 64, kInter = 256, kRows = 4;
  std::vector<RandomExpert> experts;
  std::vector<HostExpert> hosts;
  for (int64_t e = 0; e < kExperts; ++e) {
    experts.emplace_back(DType::kInt32, DType::kInt32, kHidden, kInter, 10 * e);
    experts.back().down = with_group_scales(kHidden, kInter, 10 * e + 5);
  }
  for (const RandomExpert& expert : experts) hosts.push_back(expert.host());
  const Floats x = to_bf16_values(Random(2).floats(kRows * kHidden, 0.2f));
  const Floats all = run_experts(b, x, kRows, *b.prepare_experts(hosts));
  const std::vector<double> expected(all.begin(), all.end());
  EXPECT(*std::max_element(expected.begin(), expected.end()) > 0.1);
  for (int64_t ranks : {2, 4, 8}) {
    const int64_t inter = kInter / ranks;
    std::vector<double> sum(kRows * kHidden, 0.0);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto weight = b.make_experts(
          {.num_experts = kExperts, .hidden_size = kHidden, .intermediate_size = inter});
      for (int64_t e = 0; e < kExperts; ++e) {
        const Part rows{rank * inter, inter, 0, kHidden}, columns{0, kHidden, rank * inter, inter};
        b.fill_expert(*weight, e,
                      {slice_of(experts[e].gate, rows), slice_of(experts[e].up, rows),
                       slice_of(experts[e].down, columns)});
      }
      const Floats result = run_experts(b, x, kRows, *weight);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += result[i];
    }
    EXPECT(relative_error(sum, expected).worst < 1e-5);
  }
}

// More than travels to a device at a time.
KDT_TEST(many_bytes_keep_their_order) {
  Backend& b = backend();
  for (DType dtype : kDTypes) {
    const int64_t out = dtype == DType::kFloat32 ? 352 : 672;
    const int64_t in = dtype == DType::kInt32 ? 16384 : 4096;
    const Matrix first = random_matrix(dtype, out, in, 1),
                 second = random_matrix(dtype, out, in, 2);
    Bytes expected = bytes_of(b, b.prepare_linear({first.host()})->memory());
    append(expected, bytes_of(b, b.prepare_linear({second.host()})->memory()));
    EXPECT(expected.size() > (size_t{9} << 20));
    for (int i = 0; i < 3; ++i)
      EXPECT(same_bits(bytes_of(b, b.prepare_linear({first.host(), second.host()})->memory()),
                       expected));
  }
}

KDT_TEST(ranks_fill_at_the_same_time) {
  const RandomExpert expert(DType::kInt32, DType::kInt32, 512, 256, 1);
  constexpr int kRanks = 4;
  std::vector<Bytes> memory(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto b = make_backend(device(), 2);
      const auto weight =
          b->make_experts({.num_experts = 8, .hidden_size = 512, .intermediate_size = 256});
      for (int64_t e = 0; e < 8; ++e) b->fill_expert(*weight, e, expert.host());
      memory[rank] = bytes_of(*b, weight->memory());
    });
  }
  for (std::thread& rank : ranks) rank.join();
  Backend& b = backend();
  const Bytes expected =
      bytes_of(b, b.prepare_experts(std::vector<HostExpert>(8, expert.host()))->memory());
  for (const Bytes& of_rank : memory) EXPECT(same_bits(of_rank, expected));
}

KDT_TEST(what_does_not_fit_is_refused) {
  Backend& b = backend();
  const Matrix bf16 = random_matrix(DType::kBFloat16, 8, 64, 1),
               int4 = random_matrix(DType::kInt32, 8, 64, 2);
  const auto weight = b.make_linear({{8, 64, DType::kInt32}, {8, 64, DType::kInt32}});
  const auto fill = [&](const HostMatrix& second) {
    b.fill_linear(*weight, {int4.host(), second});
  };
  fill(int4.host());
  EXPECT_THROWS("fill_linear: matrix 1 is bf16 [8, 64], want int4 [8, 64]", fill(bf16.host()));
  EXPECT_THROWS("fill_linear: matrix 1 is int4 [7, 64], want int4 [8, 64]",
                fill(slice_of(int4, {0, 7, 0, 64})));
  EXPECT_THROWS("fill_linear: matrix 1 is int4 [8, 32], want int4 [8, 64]",
                fill(slice_of(int4, {0, 8, 32, 32})));
  EXPECT_THROWS("fill_linear: 1 matrices, want 2", b.fill_linear(*weight, {int4.host()}));
  HostMatrix bad = int4.host();
  bad.scale = nullptr;
  EXPECT_THROWS("matrix 1: int4 weight: no scale", fill(bad));
  bad = int4.host();
  bad.data = nullptr;
  EXPECT_THROWS("matrix 1: no data", fill(bad));
  bad = int4.host();
  bad.row_stride = 31;
  EXPECT_THROWS("matrix 1: row_stride 31 of rows of 32 bytes", fill(bad));
  bad = int4.host();
  bad.scale_row_stride = 2;
  EXPECT_THROWS("matrix 1: scale_row_stride 2 of rows of 4 bytes", fill(bad));
  EXPECT_THROWS("make_linear: bf16 beside i32",
                b.make_linear({{8, 64, DType::kInt32}, {8, 64, DType::kBFloat16}}));
  EXPECT_THROWS("weight: shape [0, 64]", b.make_linear({{0, 64, DType::kInt32}}));

  const RandomExpert expert(DType::kInt32, DType::kInt32, 64, 32, 1);
  const auto experts =
      b.make_experts({.num_experts = 2, .hidden_size = 64, .intermediate_size = 32});
  b.fill_expert(*experts, 1, expert.host());
  EXPECT_THROWS("fill_expert: expert 2 of 2", b.fill_expert(*experts, 2, expert.host()));
  EXPECT_THROWS("fill_expert: expert -1 of 2", b.fill_expert(*experts, -1, expert.host()));
  HostExpert wrong = expert.host();
  wrong.up = bf16.host();
  EXPECT_THROWS("fill_expert: up is bf16 [8, 64], want int4 [32, 64]",
                b.fill_expert(*experts, 0, wrong));
  wrong = expert.host();
  wrong.down = expert.gate.host();
  EXPECT_THROWS("fill_expert: down is int4 [32, 64], want int4 [64, 32]",
                b.fill_expert(*experts, 0, wrong));
  EXPECT_THROWS("make_experts: 0 experts", b.make_experts({.num_experts = 0}));
  EXPECT_THROWS("int4 weight: in_features 48 is not a multiple of 32",
                b.make_experts({.num_experts = 1, .hidden_size = 64, .intermediate_size = 48}));
}

}  // namespace
}  // namespace kdt::test

KDT_OP_TEST_MAIN
