/* Weights of 4- and 8-bit codes (see model/quantize): computed in float32 and rounded once, exactly as torch does it. */
#include "vector.h"
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#define BLOCK 64
#define VALUES 16

typedef struct {
  const void *codes;   /* [rows, code_stride] of bytes: pairs of 4-bit codes, or int8 */
  const float *scales; /* [rows, scale_stride]: the largest magnitude of every 64 columns */
  const float *values; /* [16]: what the 4-bit codes stand for, or none for int8 */
  void *output;        /* [rows, columns], bfloat16 or float32, dense */
  int64_t rows, columns, code_stride, scale_stride, is_bfloat, threads;
  double step;         /* of int8 */
} Dequantize;

/* Round to bfloat16, ties to even: of every finite number, denormals too, which the processor's instruction drops. */
INLINE halves narrow_finite(vec x) {
  bits raw = (bits)x, rounded = (raw + 0x7fff + ((raw >> 16) & 1)) >> 16;
#ifdef __AVX512BW__
  return (halves)_mm512_cvtepi32_epi16((__m512i)rounded);
#else
  return __builtin_convertvector(rounded, halves);
#endif
}

INLINE void put_lanes(char *output, long at, int is_bfloat, vec x) {
  if (is_bfloat)
    ((loose_halves *)(output + 2 * at))->v = narrow_finite(x);
  else
    store((float *)output + at, x);
}

INLINE void put_one(char *output, long at, int is_bfloat, float number) {
  uint32_t raw;
  memcpy(&raw, &number, 4);
  if (is_bfloat)
    ((uint16_t *)output)[at] = (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
  else
    ((float *)output)[at] = number;
}

/* A block of 4-bit codes: of its 16 products each column takes one. */
INLINE void pairs_of_block(const uint8_t *codes, const float *values, float scale, char *output, long columns,
                           int is_bfloat) {
#ifdef __AVX512BW__
  if (columns == BLOCK) {
    vec products = load(values) * scale;
    __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    __m512i each = _mm512_or_si512(_mm512_srli_epi16(both, 4), _mm512_slli_epi16(both, 8));
    each = _mm512_and_si512(each, _mm512_set1_epi8(15)); /* the 64 codes in the order of their columns */
    if (is_bfloat) {
      __m512i table = _mm512_castsi256_si512((__m256i)narrow_finite(products));
      __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(each));
      __m512i high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(each, 1));
      _mm512_storeu_si512(output, _mm512_permutexvar_epi16(low, table));
      _mm512_storeu_si512(output + BLOCK, _mm512_permutexvar_epi16(high, table));
    } else {
      __m128i parts[4] = {_mm512_extracti32x4_epi32(each, 0), _mm512_extracti32x4_epi32(each, 1),
                          _mm512_extracti32x4_epi32(each, 2), _mm512_extracti32x4_epi32(each, 3)};
      for (int i = 0; i < 4; i++)
        store((float *)output + i * LANES,
              (vec)_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(parts[i]), (__m512)products));
    }
    return;
  }
#endif
  uint16_t rounded[VALUES];
  float whole[VALUES];
  for (int i = 0; i < VALUES; i += LANES) {
    vec products = load(values + i) * scale;
    ((loose_halves *)(rounded + i))->v = narrow_finite(products);
    store(whole + i, products);
  }
  for (long i = 0; i < columns; i++) {
    int code = i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4;
    if (is_bfloat)
      ((uint16_t *)output)[i] = rounded[code];
    else
      ((float *)output)[i] = whole[code];
  }
}

typedef int8_t octets __attribute__((vector_size(LANES)));
typedef struct { octets v; } __attribute__((packed, aligned(1), may_alias)) loose_octets;

INLINE vec numbers_of(const int8_t *codes) {
#ifdef __AVX512BW__
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#else
  return __builtin_convertvector(__builtin_convertvector(((const loose_octets *)codes)->v, ints), vec);
#endif
}

/* A block of int8: times its scale, then times the step, each product rounded. */
INLINE void bytes_of_block(const int8_t *codes, float scale, float step, char *output, long columns, int is_bfloat) {
  long at = 0;
  for (; at + LANES <= columns; at += LANES) {
    put_lanes(output, at, is_bfloat, numbers_of(codes + at) * scale * step);
  }
  for (; at < columns; at++) {
    float product = codes[at] * scale;
    put_one(output, at, is_bfloat, product * step);
  }
}

INLINE void rows_of(const Dequantize *d, int is_bfloat) {
  long width = is_bfloat ? 2 : 4;
#pragma omp parallel for schedule(static) num_threads((int)d->threads)
  for (long row = 0; row < d->rows; row++) {
    const char *codes = (const char *)d->codes + row * d->code_stride;
    const float *scales = d->scales + row * d->scale_stride;
    char *output = (char *)d->output + row * d->columns * width;
    for (long at = 0; at < d->columns; at += BLOCK) {
      long columns = d->columns - at < BLOCK ? d->columns - at : BLOCK;
      float scale = scales[at / BLOCK];
      if (d->values)
        pairs_of_block((const uint8_t *)codes + at / 2, d->values, scale, output + at * width, columns, is_bfloat);
      else
        bytes_of_block((const int8_t *)codes + at, scale, (float)d->step, output + at * width, columns, is_bfloat);
    }
  }
}

void dequantize(const Dequantize *d) {
  if (d->is_bfloat)
    rows_of(d, 1);
  else
    rows_of(d, 0);
}
