// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What fp4kit calls of cuBLAS, on the host: columns as BLAS has them, pointers where they are said
// to be, and a status if something is not as fp4kit asks for.
#include <cstddef>
#include <cstdint>

#include "common/conversions.cuh"

namespace {

int mode = -1;
void* given_stream;
void* given_workspace;

float load(const void* data, int type, long index) {
  if (type == 0) return static_cast<const float*>(data)[index];
  const unsigned bits = static_cast<const std::uint16_t*>(data)[index];
  return type == 2 ? fp4kit::from_input_bits<fp4kit::F16>(bits)
                   : fp4kit::from_input_bits<fp4kit::Bf16>(bits);
}

void store(void* data, int type, long index, float value) {
  if (type == 0) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<std::uint16_t*>(data)[index] =
        static_cast<std::uint16_t>(type == 2 ? fp4kit::to_output_bits<fp4kit::F16>(value)
                                             : fp4kit::to_output_bits<fp4kit::Bf16>(value));
  }
}

}  // namespace

extern "C" {

int cublasCreate_v2(void** handle) {
  *handle = &mode;
  return 0;
}
int cublasSetMathMode(void* handle, int math) { return handle != &mode || math != 16; }
int cublasSetStream_v2(void* handle, void* stream) {
  given_stream = stream;
  given_workspace = nullptr;
  return handle != &mode;
}
int cublasSetWorkspace_v2(void* handle, void* workspace, std::size_t size) {
  given_workspace = workspace;
  return handle != &mode || size != 32u << 20;
}
int cublasSetPointerMode_v2(void* handle, int given) {
  mode = given;
  return handle != &mode;
}
int cublasGetProperty(int type, int* value) {
  *value = 13 + type;
  return 0;
}

int cublasGemmEx(void* handle, int turns_a, int turns_b, int m, int n, int k, const void* alpha,
    const void* a, int type_a, int lda, const void* b, int type_b, int ldb, const void* beta,
    void* c, int type_c, int ldc, int compute, int algorithm) {
  if (handle != &mode || given_stream == nullptr || given_workspace == nullptr) return 1;
  if (turns_a != 1 || turns_b != 0 || algorithm != -1 || type_a != type_b) return 2;
  if (compute != (type_a == 0 ? 69 : 68) || (type_c != 0 && type_c != type_a)) return 3;
  if (mode < 0 || mode > 1 || *static_cast<const float*>(beta) != 0) return 4;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (long l = 0; l < k; ++l) {
        sum += load(a, type_a, l + static_cast<long>(i) * lda) *
               load(b, type_b, l + static_cast<long>(j) * ldb);
      }
      const float factor = *static_cast<const float*>(alpha);
      store(c, type_c, i + static_cast<long>(j) * ldc, factor * sum);
    }
  }
  return 0;
}

}  // extern "C"
