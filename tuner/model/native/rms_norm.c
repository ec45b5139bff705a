/* Root-mean-square norm (Zhang & Sennrich 2019) of rows, in float32, and its gradients. */
#include <math.h>
#include "vector.h"

#define PARTS 16

typedef struct {
  const void *input;  /* [rows, columns], bfloat16 or float32, dense */
  const void *weight; /* [columns] */
  void *output;       /* [rows, columns] */
  float *inverse;     /* [rows]: one over the root of the mean square */
  const void *upstream;
  void *grad_input;
  float *grad_weight; /* [PARTS, columns], or none */
  int64_t rows, columns, input_is_bfloat, weight_is_bfloat, output_is_bfloat, threads;
  double epsilon;
} RmsNorm;

/* What the weight is multiplied by: in the type of the input, as transformers computes it. */
INLINE vec normal_at(const RmsNorm *n, const char *row, long at, float inverse) {
  vec x = numbers_at(row, at, n->columns, n->input_is_bfloat) * inverse;
  return n->input_is_bfloat ? widen(narrow(x)) : x;
}

INLINE const char *row_of(const void *base, long row, long columns, int is_bfloat) {
  return (const char *)base + row * columns * (is_bfloat ? 2 : 4);
}

void rms_norm_forward(const RmsNorm *n) {
#pragma omp parallel for schedule(static) num_threads((int)n->threads)
  for (long row = 0; row < n->rows; row++) {
    const char *input = row_of(n->input, row, n->columns, n->input_is_bfloat);
    char *output = (char *)row_of(n->output, row, n->columns, n->output_is_bfloat);
    vec squares = {0};
    for (long at = 0; at < n->columns; at += LANES) {
      vec x = numbers_at(input, at, n->columns, n->input_is_bfloat);
      squares += x * x;
    }
    float inverse = 1.0f / sqrtf(sum_of(squares) / n->columns + (float)n->epsilon);
    n->inverse[row] = inverse;
    for (long at = 0; at < n->columns; at += LANES)
      put_at(output, at, n->columns, n->output_is_bfloat,
             normal_at(n, input, at, inverse) * numbers_at(n->weight, at, n->columns, n->weight_is_bfloat));
  }
}

/* Rows are dealt to PARTS parts, whatever the number of threads: so is the order in which the weight's gradient grows. */
void rms_norm_backward(const RmsNorm *n) {
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)n->threads)
  for (long part = 0; part < PARTS; part++) {
    float *grad_weight = n->grad_weight ? n->grad_weight + part * n->columns : 0;
    if (grad_weight) memset(grad_weight, 0, n->columns * sizeof(float));
    for (long row = n->rows * part / PARTS; row < n->rows * (part + 1) / PARTS; row++) {
      const char *input = row_of(n->input, row, n->columns, n->input_is_bfloat);
      const char *upstream = row_of(n->upstream, row, n->columns, n->output_is_bfloat);
      float inverse = n->inverse[row];
      vec products = {0};
      for (long at = 0; at < n->columns; at += LANES) {
        vec up = numbers_at(upstream, at, n->columns, n->output_is_bfloat);
        products += up * numbers_at(n->weight, at, n->columns, n->weight_is_bfloat) *
                    numbers_at(input, at, n->columns, n->input_is_bfloat);
        if (!grad_weight) continue;
        vec grown = numbers_at((char *)grad_weight, at, n->columns, 0) + up * normal_at(n, input, at, inverse);
        put_at((char *)grad_weight, at, n->columns, 0, grown);
      }
      if (!n->grad_input) continue;
      float along = sum_of(products) / n->columns * inverse * inverse;
      char *grad = (char *)row_of(n->grad_input, row, n->columns, n->input_is_bfloat);
      for (long at = 0; at < n->columns; at += LANES) {
        vec up = numbers_at(upstream, at, n->columns, n->output_is_bfloat) *
                 numbers_at(n->weight, at, n->columns, n->weight_is_bfloat);
        put_at(grad, at, n->columns, n->input_is_bfloat,
               (up - numbers_at(input, at, n->columns, n->input_is_bfloat) * along) * inverse);
      }
    }
  }
}
