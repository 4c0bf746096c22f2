#include "model/load_plan.h"

#include <cstring>

namespace kdt {
namespace {

void append(std::vector<Tensor>& to, const std::vector<Tensor>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

std::vector<float> to_floats(const HostMatrix& vector) {
  std::vector<float> values(vector.out_features);
  for (int64_t i = 0; i < vector.out_features; ++i) {
    if (vector.dtype == DType::kFloat32) {
      std::memcpy(&values[i], vector.row(i), sizeof(float));
    } else {
      uint16_t bits;
      std::memcpy(&bits, vector.row(i), sizeof(bits));
      values[i] = bf16_to_float(bits);
    }
  }
  return values;
}

// The transpose of each head's first `rows` rows of `stride`: [heads * columns, rows].
template <typename T>
std::vector<T> transposed_heads(const HostMatrix& matrix, int64_t heads, int64_t stride,
                                int64_t rows) {
  const int64_t columns = matrix.in_features;
  std::vector<T> out(heads * columns * rows);
  std::vector<T> row(columns);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(row.data(), matrix.row(h * stride + i), columns * sizeof(T));
      for (int64_t r = 0; r < columns; ++r) out[(h * columns + r) * rows + i] = row[r];
    }
  }
  return out;
}

}  // namespace

LoadPlan::LoadPlan(Backend& backend, const TensorSource& source, WeightSpecs specs,
                   const Shard& shard)
    : backend_(backend), source_(source), specs_(std::move(specs)), shard_(shard) {
  const WeightFaults faults = check_weights(specs_, source_);
  if (faults.count == 0) return;
  constexpr size_t kNamed = 5;
  std::string text;
  for (size_t i = 0; i < faults.faults.size() && i < kNamed; ++i)
    text += (i ? "; " : "") + faults.faults[i];
  throw Error(join(source_.name(), ": ", faults.count, " tensors are not as config.json asks: ",
                   text, faults.count > kNamed ? "; ..." : ""));
}

const WeightSpec& LoadPlan::spec(const std::string& name) const {
  const auto found = specs_.find(name);
  KDT_CHECK(found != specs_.end(), "weights: '", name, "' is not in the contract");
  return found->second;
}

DType LoadPlan::dtype(const std::string& name) const {
  if (source_.find(name + ".weight_packed") != nullptr) return DType::kInt32;
  const bool is_vector = spec(name).kind == WeightSpec::Kind::kVector;
  const SafetensorsView* view = source_.find(is_vector ? name : name + ".weight");
  return view->dtype == "F32" ? DType::kFloat32 : DType::kBFloat16;
}

MatrixShape LoadPlan::shape(const std::string& name, const Shard& shard) const {
  const WeightSpec& s = spec(name);
  const MatrixShape shape{s.local_out(shard), s.local_in(shard), dtype(name)};
  if (shape.dtype == DType::kInt32) check_int4_slice(name, shape.in_features, shard);
  return shape;
}

void LoadPlan::make(LoadItem& item) const {
  try {
    item.make();
  } catch (const Error& error) {
    throw Error(join(source_.name(), ": ", item.name, ": ", error.what()));
  }
}

HostMatrix LoadPlan::slice(const std::string& name, const HostMatrix& whole,
                           const Shard& shard) const {
  const WeightSpec& s = spec(name);
  HostMatrix part = whole;
  if (s.split == WeightSpec::Split::kRows) {
    const int64_t begin = s.slice_begin(shard);
    part.data = whole.row(begin);
    if (whole.scale != nullptr) part.scale = whole.scale_row(begin);
    part.out_features = s.slice_count(shard);
  } else if (s.split == WeightSpec::Split::kColumns) {
    const int64_t begin = s.slice_begin(shard);
    const bool int4 = whole.dtype == DType::kInt32;
    part.data += int4 ? begin / 2 : begin * static_cast<int64_t>(dtype_bytes(whole.dtype));
    if (int4) part.scale += begin / 32 * 2;
    part.row_stride = whole.row(1) - whole.row(0);
    part.scale_row_stride = int4 ? whole.scale_row(1) - whole.scale_row(0) : 0;
    part.in_features = s.slice_count(shard);
  }
  return part;
}

void LoadPlan::linear(const std::vector<std::string>& stacked, std::unique_ptr<LinearWeight>* to) {
  std::vector<MatrixShape> shapes;
  for (const std::string& name : stacked) shapes.push_back(shape(name, shard_));
  items_.push_back({.name = stacked.front(),
                    .make = [=, this] { *to = backend_.make_linear(shapes); },
                    .parts = {{stacked,
                               [=, this](const std::vector<HostMatrix>& whole) {
                                 std::vector<HostMatrix> mine;
                                 for (size_t i = 0; i < whole.size(); ++i)
                                   mine.push_back(slice(stacked[i], whole[i], shard_));
                                 backend_.fill_linear(**to, mine);
                               }}},
                    .memory = [=] { return (*to)->memory(); },
                    .drop = [=] { to->reset(); }});
}

void LoadPlan::vector(const std::string& name, Buffer* to) {
  const int64_t n = spec(name).out;
  items_.push_back({.name = name,
                    .make = [=, this] { *to = backend_.allocate(DType::kFloat32, {n}); },
                    .parts = {{{name},
                               [=, this](const std::vector<HostMatrix>& whole) {
                                 backend_.upload(to->tensor, to_floats(whole.front()).data());
                               }}},
                    .memory = [=] { return std::vector<Tensor>{to->tensor}; },
                    .drop = [=] { *to = {}; }});
}

void LoadPlan::table(const std::string& name, Buffer* to) {
  const MatrixShape local = shape(name, shard_);
  items_.push_back(
      {.name = name,
       .make =
           [=, this] {
             *to = backend_.allocate(local.dtype, {local.out_features, local.in_features});
           },
       .parts = {{{name},
                  [=, this](const std::vector<HostMatrix>& whole) {
                    // A slice of rows is one piece.
                    backend_.upload(to->tensor, slice(name, whole.front(), shard_).data);
                  }}},
       .memory = [=] { return std::vector<Tensor>{to->tensor}; },
       .drop = [=] { *to = {}; }});
}

void LoadPlan::kv_b(const std::string& name, int64_t nope, int64_t v,
                    std::unique_ptr<LinearWeight>* w_uk, std::unique_ptr<LinearWeight>* w_uv) {
  const MatrixShape local = shape(name, shard_);
  const int64_t rank = local.in_features, heads = local.out_features / (nope + v);
  const DType dtype = local.dtype;
  const auto fill = [=, this](const std::vector<HostMatrix>& whole) {
    const HostMatrix all = slice(name, whole.front(), shard_);
    std::vector<HostMatrix> keys(heads), values(heads);
    const auto use = [&](const auto& transposed) {
      for (int64_t h = 0; h < heads; ++h) {
        keys[h] = {.data = reinterpret_cast<const uint8_t*>(transposed.data() + h * rank * nope),
                   .dtype = dtype,
                   .out_features = rank,
                   .in_features = nope};
        values[h] = all;
        values[h].data = all.row(h * (nope + v) + nope);
        values[h].out_features = v;
      }
      backend_.fill_linear(**w_uk, keys);
      backend_.fill_linear(**w_uv, values);
    };
    dtype == DType::kFloat32 ? use(transposed_heads<uint32_t>(all, heads, nope + v, nope))
                             : use(transposed_heads<uint16_t>(all, heads, nope + v, nope));
  };
  items_.push_back({.name = name,
                    .make =
                        [=, this] {
                          *w_uk = backend_.make_linear(
                              std::vector<MatrixShape>(heads, MatrixShape{rank, nope, dtype}));
                          *w_uv = backend_.make_linear(
                              std::vector<MatrixShape>(heads, MatrixShape{v, rank, dtype}));
                        },
                    .parts = {{{name}, fill}},
                    .memory =
                        [=] {
                          std::vector<Tensor> all = (*w_uk)->memory();
                          append(all, (*w_uv)->memory());
                          return all;
                        },
                    .drop =
                        [=] {
                          w_uk->reset();
                          w_uv->reset();
                        }});
}

void LoadPlan::experts(const std::string& name, int64_t num_experts,
                       std::unique_ptr<ExpertsWeight>* to) {
  // Whole experts, or a slice of each.
  const Shard inside = shard_.expert_parallel ? Shard{} : shard_;
  const int64_t first = shard_.expert_parallel ? shard_.begin(num_experts) : 0;
  const int64_t count = shard_.expert_parallel ? shard_.count(num_experts) : num_experts;
  const auto modules = [name](int64_t e) {
    const std::string expert = name + "." + std::to_string(e);
    return std::vector<std::string>{expert + ".gate_proj", expert + ".up_proj",
                                    expert + ".down_proj"};
  };
  const std::vector<std::string> some = modules(first);
  const MatrixShape gate = shape(some[0], inside), down = shape(some[2], inside);
  const ExpertsShape made{.num_experts = count,
                          .hidden_size = gate.in_features,
                          .intermediate_size = gate.out_features,
                          .gate_up_dtype = gate.dtype,
                          .down_dtype = down.dtype};
  LoadItem item{.name = name,
                .make = [=, this] { *to = backend_.make_experts(made); },
                .parts = {},
                .memory = [=] { return (*to)->memory(); },
                .drop = [=] { to->reset(); }};
  // All ranks list all experts, so that their plans have equal parts.
  for (int64_t e = 0; e < num_experts; ++e) {
    const std::vector<std::string> parts = modules(e);
    item.parts.push_back({parts, [=, this](const std::vector<HostMatrix>& whole) {
                            if (e < first || e >= first + count) return;
                            backend_.fill_expert(**to, e - first,
                                                 {.gate = slice(parts[0], whole[0], inside),
                                                  .up = slice(parts[1], whole[1], inside),
                                                  .down = slice(parts[2], whole[2], inside)});
                          }});
  }
  items_.push_back(std::move(item));
}

}  // namespace kdt
