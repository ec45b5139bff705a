/* 4- and 8-bit codes of weights (see model/quantize), the very codes that torch computes: in float32, step by step. */
#include "vector.h"

#define BLOCK 64
#define VALUES 16

typedef struct {
  const void *weight;  /* [rows, columns], bfloat16 or float32, dense */
  const float *bounds; /* [15]: up to each a number belongs to the lower of two 4-bit codes; none for int8 */
  void *codes;         /* [rows, code_stride] of bytes: pairs of 4-bit codes, or int8 */
  float *scales;       /* [rows, blocks]: the largest magnitude of every 64 columns, 0 where that is below tiny */
  int64_t rows, columns, code_stride, blocks, is_bfloat, threads;
  double tiny, huge;
} Quantize;

/* Codes of 4 bits: how many bounds lie below. */
INLINE ints places_of(vec parts, const float *bounds) {
  ints places = {0};
  for (int i = 0; i < VALUES - 1; i++) places -= (ints)(parts > bounds[i]);
  return places;
}

/* The nearest whole number, ties to even, of numbers below 2^22. */
INLINE ints nearest_to(vec parts) {
  vec magic = all(12582912.0f);
  __asm__("" : "+m"(parts)); /* or the product that it is would be added unrounded */
  return __builtin_convertvector((parts + magic) - magic, ints);
}

typedef uint8_t octets __attribute__((vector_size(LANES)));

/* Codes and scale of up to 64 numbers of a row; 1 where one of them is no number up to huge. */
INLINE int quantize_block(const Quantize *q, const char *row, long at, char *codes, float *scale, int is_bfloat) {
  vec numbers[BLOCK / LANES];
  ints highest = {0};
  for (int i = 0; i < BLOCK / LANES; i++) {
    long from = at + i * LANES;
    numbers[i] = from < q->columns ? numbers_at(row, from, q->columns, is_bfloat) : (vec){0};
    ints magnitude = (ints)numbers[i] & 0x7fffffff;
    highest = (ints)pick(magnitude > highest, (vec)magnitude, (vec)highest);
  }
  float largest = (float)q->huge;
  int32_t limit;
  memcpy(&limit, &largest, sizeof limit);
  if (max_of(pick(highest > limit, all(1.0f), (vec){0})) > 0) return 1; /* the bits of NaN and infinity are above it */
  largest = max_of((vec)highest);
  if (largest < (float)q->tiny) largest = 0;
  *scale = largest;
  uint8_t found[BLOCK];
  float factor = largest > 0 ? 1.0f / largest * (q->bounds ? 1.0f : 127.0f) : 0;
  for (int i = 0; i < BLOCK / LANES; i++) {
    vec parts = numbers[i] * factor;
    octets narrow = __builtin_convertvector(q->bounds ? places_of(parts, q->bounds) : nearest_to(parts), octets);
    memcpy(found + i * LANES, &narrow, LANES);
  }
  long columns = q->columns - at < BLOCK ? q->columns - at : BLOCK;
  if (!q->bounds) {
    memcpy(codes, found, columns);
    return 0;
  }
  uint8_t pairs[BLOCK / 2];
  for (int i = 0; i < BLOCK / 2; i++) pairs[i] = found[2 * i] << 4 | found[2 * i + 1];
  memcpy(codes, pairs, (columns + 1) / 2);
  return 0;
}

/* Number of the first row that holds what is no number up to huge, from 1; 0 where there is none. */
int64_t quantize(const Quantize *q) {
  int64_t bad = q->rows + 1;
#pragma omp parallel for schedule(static) reduction(min : bad) num_threads((int)q->threads)
  for (long row = 0; row < q->rows; row++) {
    const char *weight = (const char *)q->weight + row * q->columns * (q->is_bfloat ? 2 : 4);
    char *codes = (char *)q->codes + row * q->code_stride;
    int wrong = 0;
    for (long at = 0; at < q->columns; at += BLOCK) {
      float *scale = q->scales + row * q->blocks + at / BLOCK;
      char *own = codes + (q->bounds ? at / 2 : at);
      wrong |= q->is_bfloat ? quantize_block(q, weight, at, own, scale, 1) : quantize_block(q, weight, at, own, scale, 0);
    }
    if (wrong && row + 1 < bad) bad = row + 1;
  }
  return bad > q->rows ? 0 : bad;
}
