// Two back ends as one, for tests and for finding a wrong kernel inside a model; slow.
#pragma once

#include "backend/backend.h"

namespace kdt {

// Every op runs on both; the first difference is an Error that names the op, the row and the
// values.
//
// Tensors lie in the reference's memory, and each allocation has a twin in the other's. After an op
// the twin gets the reference's result, so differences do not add up. Weights and caches exist on
// both. Caches are not compared, but what attention reads from them is.
std::unique_ptr<Backend> make_check_backend(std::unique_ptr<Backend> reference,
                                            std::unique_ptr<Backend> other);

}  // namespace kdt
