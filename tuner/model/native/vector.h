/* Vectors of as many floats as one register of the processor holds, and the small matrix product over them. */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* A wider vector would be several registers, and the compiler keeps those of a product in memory. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef struct { vec v; } __attribute__((packed, aligned(4), may_alias)) loose_vec;
typedef struct { halves v; } __attribute__((packed, aligned(2), may_alias)) loose_halves;

INLINE vec load(const float *p) { return ((const loose_vec *)p)->v; }
INLINE void store(float *p, vec x) { ((loose_vec *)p)->v = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec pick(ints where, vec a, vec b) { return (vec)((ints)a & where | (ints)b & ~where); }
INLINE vec larger(vec a, vec b) { return pick(a > b, a, b); }

INLINE vec widen(halves x) { return (vec)(__builtin_convertvector(x, bits) << 16); }

/* Round to bfloat16, ties to even; what is no number stays none. The processor's own instruction takes numbers below
   1.2e-38 for zeros. */
INLINE halves narrow(vec x) {
#ifdef __AVX512BF16__
  return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
  bits raw = (bits)x, rounded = raw + 0x7fff + ((raw >> 16) & 1);
  rounded = (bits)pick(x != x, (vec)(raw | 0x400000), (vec)rounded);
  return __builtin_convertvector(rounded >> 16, halves);
#endif
}

INLINE float one_at(const char *base, long i, int is_bfloat) {
  uint32_t raw = is_bfloat ? (uint32_t)((const uint16_t *)base)[i] << 16 : ((const uint32_t *)base)[i];
  float number;
  memcpy(&number, &raw, 4);
  return number;
}

/* LANES numbers from `at` of a row of `columns`, bfloat16 or float32; those beyond its end are zeros. */
INLINE vec numbers_at(const char *row, long at, long columns, int is_bfloat) {
  if (at + LANES <= columns)
    return is_bfloat ? widen(((const loose_halves *)(row + 2 * at))->v) : load((const float *)row + at);
  vec found = {0};
  for (long i = 0; at + i < columns; i++) found[i] = one_at(row, at + i, is_bfloat);
  return found;
}

INLINE void put_at(char *row, long at, long columns, int is_bfloat, vec x) {
  halves rounded = narrow(x);
  if (at + LANES <= columns) {
    if (is_bfloat)
      ((loose_halves *)(row + 2 * at))->v = rounded;
    else
      store((float *)row + at, x);
    return;
  }
  for (long i = 0; at + i < columns; i++)
    if (is_bfloat)
      ((uint16_t *)row)[at + i] = rounded[i];
    else
      ((float *)row)[at + i] = x[i];
}

INLINE float sum_of(vec x) {
  float lanes[LANES];
  memcpy(lanes, &x, sizeof lanes);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

INLINE float max_of(vec x) {
  float lanes[LANES];
  memcpy(lanes, &x, sizeof lanes);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

/* 2 to the power x, relative error below 2e-7; exactly 0 below -126, and what is no number stays none. */
INLINE vec exp2_of(vec x) {
  vec magic = all(12582912.0f), bound = larger(x, all(-127.0f));
  vec whole = (bound + magic) - magic, f = bound - whole;
  vec y = all(1.5252734e-05f);
  y = y * f + 1.5403530e-04f;
  y = y * f + 1.3333558e-03f;
  y = y * f + 9.6181291e-03f;
  y = y * f + 5.5504109e-02f;
  y = y * f + 2.4022651e-01f;
  y = y * f + 6.9314718e-01f;
  y = y * f + 1.0f;
  vec scaled = (vec)((ints)y + (__builtin_convertvector(whole, ints) << 23));
  return pick(x >= -126.0f, scaled, pick(x < -126.0f, (vec){0}, x));
}

#define FOUR(of, j, s) of(j, s), of(j + 1, s), of(j + 2, s), of(j + 3, s)
#if LANES == 16
#define LANES_OF(of, s) FOUR(of, 0, s), FOUR(of, 4, s), FOUR(of, 8, s), FOUR(of, 12, s)
#elif LANES == 8
#define LANES_OF(of, s) FOUR(of, 0, s), FOUR(of, 4, s)
#else
#define LANES_OF(of, s) FOUR(of, 0, s)
#endif
#define LOW(j, s) ((j) & (s) ? LANES + (j) - (s) : (j))
#define HIGH(j, s) ((j) & (s) ? LANES + (j) : (j) + (s))
#define STAGE(r, s)                                                     \
  for (int i = 0; i < LANES; i++)                                       \
    if (!(i & s)) {                                                     \
      vec a = r[i], b = r[i + s];                                       \
      r[i] = __builtin_shufflevector(a, b, LANES_OF(LOW, s));           \
      r[i + s] = __builtin_shufflevector(a, b, LANES_OF(HIGH, s));      \
    }

/* Turn LANES rows of LANES into columns. */
INLINE void transpose(vec *r) {
#if LANES > 8
  STAGE(r, 8)
#endif
#if LANES > 4
  STAGE(r, 4)
#endif
  STAGE(r, 2)
  STAGE(r, 1)
}

/* Rows of a product whose sums, two vectors each, are kept in registers: of 32, or of 16. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 8
#else
#define ROWS 4
#endif

/* C[ROWS][LANES n] = (or +=) sum over k of A(i, k) B[k][j]: A(i, k) lies at a[i * row + k * column]. */
#define PRODUCT(name, n)                                                                                      \
  INLINE void name(long depth, const float *a, long row, long column, const float *b, long width, float *c,   \
                   long out, int add) {                                                                       \
    vec sum[ROWS][n];                                                                                         \
    for (int i = 0; i < ROWS; i++)                                                                            \
      for (int j = 0; j < n; j++) sum[i][j] = add ? load(c + i * out + j * LANES) : (vec){0};                 \
    for (long k = 0; k < depth; k++) {                                                                        \
      vec right[n];                                                                                           \
      for (int j = 0; j < n; j++) right[j] = load(b + k * width + j * LANES);                                 \
      for (int i = 0; i < ROWS; i++)                                                                          \
        for (int j = 0; j < n; j++) sum[i][j] += a[i * row + k * column] * right[j];                          \
    }                                                                                                         \
    for (int i = 0; i < ROWS; i++)                                                                            \
      for (int j = 0; j < n; j++) store(c + i * out + j * LANES, sum[i][j]);                                  \
  }
PRODUCT(product_of_2, 2)
PRODUCT(product_of_1, 1)

/* The same for any multiple of 8 rows and of LANES columns. */
INLINE void multiply(long rows, long columns, long depth, const float *a, long row, long column, const float *b,
                     long width, float *c, long out, int add) {
  for (long j = 0; j < columns; j += 2 * LANES)
    for (long i = 0; i < rows; i += ROWS)
      if (columns - j >= 2 * LANES)
        product_of_2(depth, a + i * row, row, column, b + j, width, c + i * out + j, out, add);
      else
        product_of_1(depth, a + i * row, row, column, b + j, width, c + i * out + j, out, add);
}

/* Processors that multiply and add up pairs of bfloat16 numbers in one instruction; the products are exact in float32. */
#ifdef __AVX512BF16__
#define HAS_PAIRS 1
INLINE vec add_pair(vec sum, uint32_t left, vec right) {
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)left), (__m512bh)right);
}

/* C = sum over k of the products of the pairs a[i * row + k] and b[k][j], for any multiple of 8 rows and of 32 columns. */
INLINE void multiply_pairs(long rows, long columns, long depth, const uint32_t *a, long row, const float *b, long width,
                           float *c, long out) {
  for (long j = 0; j < columns; j += 2 * LANES)
    for (long i = 0; i < rows; i += 8) {
      vec sum[8][2] = {0};
      for (long k = 0; k < depth; k++) {
        vec right[2] = {load(b + k * width + j), load(b + k * width + j + LANES)};
        for (int r = 0; r < 8; r++)
          for (int h = 0; h < 2; h++) sum[r][h] = add_pair(sum[r][h], a[(i + r) * row + k], right[h]);
      }
      for (int r = 0; r < 8; r++)
        for (int h = 0; h < 2; h++) store(c + (i + r) * out + j + h * LANES, sum[r][h]);
    }
}
#else
#define HAS_PAIRS 0
#define multiply_pairs(...) ((void)0) /* where there are no pairs, nothing gets there */
#endif
