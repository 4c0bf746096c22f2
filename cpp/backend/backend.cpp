#include "backend/backend.h"

namespace kdt {
namespace {

MatrixShape shape_of(const HostMatrix& matrix) {
  return {matrix.out_features, matrix.in_features, matrix.dtype};
}

}  // namespace

std::unique_ptr<Recording> Backend::record(const std::function<void()>&) {
  throw Error(join(info().device, ": nothing is recorded here"));
}

std::unique_ptr<LinearWeight> Backend::prepare_linear(const std::vector<HostMatrix>& stacked) {
  std::vector<MatrixShape> shapes;
  for (const HostMatrix& matrix : stacked) shapes.push_back(shape_of(matrix));
  auto weight = make_linear(shapes);
  fill_linear(*weight, stacked);
  return weight;
}

std::unique_ptr<ExpertsWeight> Backend::prepare_experts(const std::vector<HostExpert>& experts) {
  KDT_CHECK(!experts.empty(), "prepare_experts: no expert");
  const HostExpert& first = experts.front();
  auto weight = make_experts({.num_experts = static_cast<int64_t>(experts.size()),
                              .hidden_size = first.gate.in_features,
                              .intermediate_size = first.gate.out_features,
                              .gate_up_dtype = first.gate.dtype,
                              .down_dtype = first.down.dtype});
  for (size_t i = 0; i < experts.size(); ++i) {
    fill_expert(*weight, static_cast<int64_t>(i), experts[i]);
  }
  return weight;
}

}  // namespace kdt
