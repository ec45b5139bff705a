/* Rotary position embedding (Su et al. 2021): the two halves of a head's numbers are turned against each other. */
#include "vector.h"

typedef struct {
  const void *input; /* [heads, tokens, width], bfloat16 or float32; the last dimension is dense */
  const void *cosine;
  const void *sine; /* [tokens, width], dense */
  void *output;     /* [tokens, heads, width] */
  int64_t heads, tokens, width, input_head, input_token;
  int64_t input_is_bfloat, angles_are_bfloat, output_is_bfloat, back, threads;
} Rotary;

void rotate(const Rotary *r) {
  long half = r->width / 2, input_item = r->input_is_bfloat ? 2 : 4, angle_item = r->angles_are_bfloat ? 2 : 4;
  long output_item = r->output_is_bfloat ? 2 : 4;
#pragma omp parallel for schedule(static) num_threads((int)r->threads)
  for (long token = 0; token < r->tokens; token++)
    for (long at = 0; at < half; at += LANES) {
      const char *cosine = (const char *)r->cosine + token * r->width * angle_item;
      const char *sine = (const char *)r->sine + token * r->width * angle_item;
      vec cosines[2], sines[2];
      for (int i = 0; i < 2; i++) {
        cosines[i] = numbers_at(cosine + i * half * angle_item, at, half, r->angles_are_bfloat);
        sines[i] = numbers_at(sine + i * half * angle_item, at, half, r->angles_are_bfloat);
      }
      for (long head = 0; head < r->heads; head++) {
        const char *input = (const char *)r->input + (head * r->input_head + token * r->input_token) * input_item;
        char *output = (char *)r->output + (token * r->heads + head) * r->width * output_item;
        vec low = numbers_at(input, at, half, r->input_is_bfloat);
        vec high = numbers_at(input + half * input_item, at, half, r->input_is_bfloat);
        vec turned_low = low * cosines[0] - high * sines[0], turned_high = high * cosines[1] + low * sines[1];
        if (r->back) {
          turned_low = low * cosines[0] + high * sines[1];
          turned_high = high * cosines[1] - low * sines[0];
        }
        put_at(output, at, half, r->output_is_bfloat, turned_low);
        put_at(output + half * output_item, at, half, r->output_is_bfloat, turned_high);
      }
    }
}
