/* AdamW (Loshchilov & Hutter 2019) of one parameter in one pass: moments in 8 bits by blocks (train/moments.py) or in
   float32, weights in float32, or in bfloat16 rounded by chance (train/compact_adamw.py). Each operation is
   rounded by itself, as those of torch are: the same bits as train/compact_adamw.py in plain torch. */
#pragma GCC optimize("fp-contract=off")
#pragma STDC FP_CONTRACT OFF
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define STEP static inline __attribute__((always_inline))
#define BLOCK 256
#define LANES 4 /* random numbers of 16 bits in a word */
enum { DIVISOR, DECAY, BETA1, REST1, BETA2, REST2, RATE, ROOT, EPSILON };

typedef struct {
  const void *gradient; /* [rows, width], bfloat16 or float32 */
  void *weight;         /* [rows, width] */
  void *average;        /* [rows, width], codes or float32 */
  void *square;
  float *average_scales; /* [rows, blocks]; none for float32 */
  float *square_scales;
  const float *average_values, *square_values;
  const int32_t *average_cells, *square_cells;
  const float *numbers; /* as enumerated above */
  const float *bad;     /* above 0: nothing is done */
  const uint64_t *key;
  int64_t rows, width, first_row, first_column, whole_width, bfloat_gradient, by_chance, coded, first_cell, last_cell, threads;
} AdamW;

STEP uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

STEP float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

STEP uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

STEP float scale_of(const float *x, int64_t count) {
  uint32_t largest = 0; /* as integers magnitudes are in their own order, and what is no number is above all */
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits = bits_of(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return of_bits(largest);
}

STEP void encode_block(const AdamW *s, const float *x, int64_t count, float *scale, uint8_t *codes, const int32_t *cells,
                       int is_signed) {
  *scale = scale_of(x, count);
  float divisor = *scale == 0.0f ? 1.0f : *scale;
  int32_t first = (int32_t)s->first_cell, last = (int32_t)(s->last_cell - s->first_cell), found[BLOCK];
  for (int64_t i = 0; i < count; i++) {
    float share = of_bits(bits_of(x[i]) & 0x7fffffff) / divisor;
    int32_t bits = (int32_t)(bits_of(share) & 0x7fffffff), at = (bits >> 16) - first;
    int32_t cell = cells[at < 0 ? 0 : at > last ? last : at];
    int32_t rank = (cell >> 17) + ((bits & 0xffff) >= (cell & 0x1ffff));
    if (is_signed)
      found[i] = x[i] < 0.0f ? 127 - (rank > 127 ? 127 : rank) : 127 + rank;
    else
      found[i] = x[i] > 0.0f && rank < 1 ? 1 : rank;
  }
  for (int64_t i = 0; i < count; i++) codes[i] = (uint8_t)found[i];
}

/* Where the processor has it, the 256 values are looked up in its registers, which is faster than in memory. */
STEP void decode_block(float *x, int64_t count, float scale, const uint8_t *codes, const float *values) {
  int64_t i = 0;
#ifdef __AVX512F__
  for (; i + 16 <= count; i += 16) {
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
    __m512 part[8];
    for (int j = 0; j < 8; j++)
      part[j] = _mm512_permutex2var_ps(_mm512_loadu_ps(values + 32 * j), code, _mm512_loadu_ps(values + 32 * j + 16));
    for (int bit = 5, left = 4; left; bit++, left /= 2) {
      __mmask16 upper = _mm512_test_epi32_mask(code, _mm512_set1_epi32(1 << bit));
      for (int j = 0; j < left; j++) part[j] = _mm512_mask_blend_ps(upper, part[2 * j], part[2 * j + 1]);
    }
    _mm512_storeu_ps(x + i, _mm512_mul_ps(part[0], _mm512_set1_ps(scale)));
  }
#endif
  for (; i < count; i++) x[i] = values[codes[i]] * scale;
}

STEP float number_at(const void *base, int64_t i, int is_bfloat) {
  return is_bfloat ? of_bits((uint32_t)((const uint16_t *)base)[i] << 16) : ((const float *)base)[i];
}

STEP void random_bits(const AdamW *s, int64_t row, int64_t first, int64_t count, uint16_t *found) {
  uint64_t words[BLOCK / LANES];
  int64_t per_row = (s->whole_width + LANES - 1) / LANES, needed = (count + LANES - 1) / LANES;
  uint64_t counter = (uint64_t)((s->first_row + row) * per_row + (s->first_column + first) / LANES), key = *s->key;
  for (int64_t i = 0; i < needed; i++) words[i] = mixed((counter + (uint64_t)i) * 0x9E3779B97F4A7C15u ^ key);
  memcpy(found, words, sizeof words);
}

STEP uint16_t narrowed(float x, uint32_t random) {
  uint32_t bits = bits_of(x), sum = bits + random;
  int special = (bits & 0x7f800000) == 0x7f800000 || (sum & 0x7f800000) == 0x7f800000;
  bits |= x != x ? 0x400000 : 0;
  return (uint16_t)((special ? bits : sum) >> 16);
}

STEP void update_block(const AdamW *s, int64_t row, int64_t block, int bfloat_gradient, int by_chance, int coded) {
  int64_t first = block * BLOCK, count = s->width - first < BLOCK ? s->width - first : BLOCK;
  int64_t at = row * s->width + first, scale = row * ((s->width + BLOCK - 1) / BLOCK) + block;
  float m[BLOCK], v[BLOCK], w[BLOCK];
  uint16_t random[BLOCK];
  const float *n = s->numbers;
  float *average = coded ? m : (float *)s->average + at, *square = coded ? v : (float *)s->square + at;
  if (coded) {
    decode_block(m, count, s->average_scales[scale], (uint8_t *)s->average + at, s->average_values);
    decode_block(v, count, s->square_scales[scale], (uint8_t *)s->square + at, s->square_values);
  }
  if (by_chance) random_bits(s, row, first, count, random);
  float divisor = n[DIVISOR], decay = n[DECAY], beta1 = n[BETA1], rest1 = n[REST1], beta2 = n[BETA2];
  float rest2 = n[REST2], rate = n[RATE], root = n[ROOT], epsilon = n[EPSILON];
  for (int64_t i = 0; i < count; i++) {
    float g = number_at(s->gradient, at + i, bfloat_gradient) / divisor;
    average[i] = average[i] * beta1 + g * rest1;
    square[i] = square[i] * beta2 + g * g * rest2;
    float size = sqrtf(square[i]) / root + epsilon;
    w[i] = number_at(s->weight, at + i, by_chance) * decay - average[i] / size * rate;
  }
  if (by_chance)
    for (int64_t i = 0; i < count; i++) ((uint16_t *)s->weight)[at + i] = narrowed(w[i], random[i]);
  else
    memcpy((float *)s->weight + at, w, (size_t)count * 4);
  if (coded) {
    encode_block(s, m, count, s->average_scales + scale, (uint8_t *)s->average + at, s->average_cells, 1);
    encode_block(s, v, count, s->square_scales + scale, (uint8_t *)s->square + at, s->square_cells, 0);
  }
}

#define WAY(g, w, c) \
  if (s->bfloat_gradient == (g) && s->by_chance == (w) && s->coded == (c)) update_block(s, i / blocks, i % blocks, g, w, c)

void adamw(const AdamW *s) {
  if (s->bad && *s->bad > 0.0f) return;
  int64_t blocks = (s->width + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads((int)s->threads)
  for (int64_t i = 0; i < s->rows * blocks; i++) {
    WAY(0, 0, 1);
    WAY(1, 0, 1);
    WAY(0, 1, 1);
    WAY(1, 1, 1);
    WAY(0, 1, 0);
    WAY(1, 1, 0);
  }
}
