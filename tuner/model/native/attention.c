/* Causal attention inside documents: tiles of queries against tiles of keys, scores never stored (Dao et al., 2022).

   Every sum is float32, in an order that depends on neither the number of threads nor the other documents. */
#include <math.h>
#include "vector.h"

#define QUERIES 64
#define KEYS 128
#define LOG2E 1.44269504088896340736f

typedef struct {
  const void *query, *key, *value, *upstream; /* bfloat16 or float32; the last dimension is dense */
  void *output;                               /* [T, heads, value_width] */
  float *normaliser;                          /* [heads, T]: log2 of the sum of 2^score */
  void *grad_query, *grad_key, *grad_value;   /* [T, heads, width], [T, key heads, width], [T, key heads, value_width] */
  float *key_parts, *value_parts;             /* [T, heads, width]: those of each query head */
  char *scratch;                              /* threads x scratch_bytes */
  const int32_t *documents;                   /* [n_documents, 2]: first token and the one after the last */
  const float *sinks;                         /* [heads]: one more score of each query, whose value is zero; or none */
  int64_t scratch_bytes, n_documents, tokens, heads, groups, width, value_width, window, is_bfloat, threads;
  int64_t query_head, query_token, key_head, key_token, value_head, value_token, upstream_head, upstream_token;
  double scale;
} Attention;

typedef struct {
  long first, tokens, head, depth, value_depth, tiles; /* depths are multiples of LANES, keys fill whole tiles */
  long pairs, value_pairs;                             /* multiples of LANES; 0 where numbers are taken one by one */
  const char *key, *value;
  long item;
} Job;

INLINE long up(long x, long to) { return (x + to - 1) / to * to; }

/* One row of `width` numbers as float32, filled up with zeros to `depth`, times `scale`. */
INLINE void load_row(float *to, const char *from, long width, long depth, int is_bfloat, float scale) {
  long i = 0;
  if (is_bfloat)
    for (; i + LANES <= width; i += LANES) store(to + i, widen(((const loose_halves *)(from + 2 * i))->v) * scale);
  else
    for (; i + LANES <= width; i += LANES) store(to + i, load((const float *)from + i) * scale);
  for (; i < width; i++) {
    uint32_t raw = is_bfloat ? (uint32_t)((const uint16_t *)from)[i] << 16 : ((const uint32_t *)from)[i];
    float number;
    memcpy(&number, &raw, 4);
    to[i] = number * scale;
  }
  for (; i < depth; i++) to[i] = 0;
}

INLINE void store_row(char *to, const float *from, long width, int is_bfloat, float scale) {
  long i = 0;
  if (is_bfloat)
    for (; i + LANES <= width; i += LANES) ((loose_halves *)(to + 2 * i))->v = narrow(load(from + i) * scale);
  else
    for (; i + LANES <= width; i += LANES) store((float *)to + i, load(from + i) * scale);
  if (i < width) {
    float rest[LANES] = {0};
    for (long j = i; j < width; j++) rest[j - i] = from[j] * scale;
    halves rounded = narrow(load(rest));
    for (long j = i; j < width; j++)
      if (is_bfloat)
        ((uint16_t *)to)[j] = rounded[j - i];
      else
        ((float *)to)[j] = rest[j - i];
  }
}

/* Rows of a document, and the same in tiles [depth][KEYS]. Either may be left out. */
static void load_rows(float *rows, float *tiles, const char *from, long stride, const Job *job, long width, long depth,
                      int is_bfloat) {
  float spare[LANES * depth], *block;
  for (long at = 0; at < job->tiles * KEYS; at += LANES) {
    block = rows ? rows + at * depth : spare;
    for (long i = 0; i < LANES; i++)
      if (at + i < job->tokens)
        load_row(block + i * depth, from + (at + i) * stride, width, depth, is_bfloat, 1.0f);
      else
        memset(block + i * depth, 0, depth * sizeof(float));
    if (!tiles) continue;
    float *tile = tiles + at / KEYS * depth * KEYS + at % KEYS;
    for (long d = 0; d < depth; d += LANES) {
      vec square[LANES];
      for (int i = 0; i < LANES; i++) square[i] = load(block + i * depth + d);
      transpose(square);
      for (int i = 0; i < LANES; i++) store(tile + (d + i) * KEYS, square[i]);
    }
  }
}

/* One row of bfloat16 numbers in pairs, filled up with zeros. */
INLINE void load_pairs(uint32_t *to, const char *from, long width, long pairs) {
  memcpy(to, from, width * 2);
  memset((char *)to + width * 2, 0, pairs * 4 - width * 2);
}

/* Rows of a document in tiles [pairs][KEYS]. */
static void load_paired_tiles(float *tiles, const char *from, long stride, const Job *job, long width, long pairs) {
  uint32_t block[LANES * pairs];
  for (long at = 0; at < job->tiles * KEYS; at += LANES) {
    for (long i = 0; i < LANES; i++)
      if (at + i < job->tokens)
        load_pairs(block + i * pairs, from + (at + i) * stride, width, pairs);
      else
        memset(block + i * pairs, 0, pairs * 4);
    float *tile = tiles + at / KEYS * pairs * KEYS + at % KEYS;
    for (long d = 0; d < pairs; d += LANES) {
      vec square[LANES];
      for (int i = 0; i < LANES; i++) square[i] = load((const float *)(block + i * pairs + d));
      transpose(square);
      for (int i = 0; i < LANES; i++) store(tile + (d + i) * KEYS, square[i]);
    }
  }
}

INLINE Job make_job(const Attention *a, long number) {
  const int32_t *document = a->documents + number / a->heads * 2;
  Job job = {.first = document[0], .tokens = document[1] - document[0], .head = number % a->heads};
  job.item = a->is_bfloat ? 2 : 4;
  job.depth = up(a->width, LANES);
  job.value_depth = up(a->value_width, LANES);
  if (HAS_PAIRS && a->is_bfloat && a->scale > 0) {
    job.pairs = up(up(a->width, 2) / 2, LANES);
    job.value_pairs = up(up(a->value_width, 2) / 2, LANES);
  }
  job.tiles = up(job.tokens, KEYS) / KEYS;
  long kv_head = job.head / a->groups;
  job.key = (const char *)a->key + (kv_head * a->key_head + job.first * a->key_token) * job.item;
  job.value = (const char *)a->value + (kv_head * a->value_head + job.first * a->value_token) * job.item;
  return job;
}

/* Keys of a tile that begins at `key`, which the query at `query` may see: from *low up to, but without, *high. */
INLINE void seen(long query, long key, long window, long count, long *low, long *high) {
  *high = query - key + 1 > count ? count : query - key + 1;
  *low = window && query - window + 1 > key ? query - window + 1 - key : 0;
  if (*high < 0) *high = 0;
  if (*low > *high) *low = *high;
}

INLINE const char *row_of(const void *base, long head, long token, long of_head, long of_token, long item) {
  return (const char *)base + (head * of_head + token * of_token) * item;
}

static void forward(const Attention *a, const Job *job, float *work) {
  float *keys = work, *values = keys + job->tiles * KEYS * job->depth;
  float *queries = values + job->tiles * KEYS * job->value_depth, *mixed = queries + QUERIES * job->depth;
  float *scores = mixed + QUERIES * job->value_depth, largest[QUERIES], total[QUERIES];
  float factor = job->pairs ? a->scale * LOG2E : 1.0f; /* else it is in the queries */
  if (job->pairs)
    load_paired_tiles(keys, job->key, a->key_token * job->item, job, a->width, job->pairs);
  else
    load_rows(0, keys, job->key, a->key_token * job->item, job, a->width, job->depth, a->is_bfloat);
  load_rows(values, 0, job->value, a->value_token * job->item, job, a->value_width, job->value_depth, a->is_bfloat);
  for (long q = 0; q < job->tokens; q += QUERIES) {
    long n = job->tokens - q < QUERIES ? job->tokens - q : QUERIES, rows = up(n, 8);
    memset(queries, 0, rows * job->depth * sizeof(float));
    memset(mixed, 0, rows * job->value_depth * sizeof(float));
    for (long i = 0; i < n; i++) {
      const char *from = row_of(a->query, job->head, job->first + q + i, a->query_head, a->query_token, job->item);
      if (job->pairs)
        load_pairs((uint32_t *)queries + i * job->pairs, from, a->width, job->pairs);
      else
        load_row(queries + i * job->depth, from, a->width, job->depth, a->is_bfloat, a->scale * LOG2E);
      largest[i] = -INFINITY;
      total[i] = 0;
    }
    for (long k = a->window && q >= a->window ? (q - a->window + 1) / KEYS * KEYS : 0; k < q + n; k += KEYS) {
      long count = up(q + n - k < KEYS ? q + n - k : KEYS, 2 * LANES);
      if (job->pairs)
        multiply_pairs(rows, count, job->pairs, (uint32_t *)queries, job->pairs, keys + k * job->pairs, KEYS, scores, KEYS);
      else
        multiply(rows, count, job->depth, queries, job->depth, 1, keys + k * job->depth, KEYS, scores, KEYS, 0);
      for (long i = 0; i < rows; i++) {
        float *row = scores + i * KEYS, *sum = mixed + i * job->value_depth;
        long low, high;
        seen(q + i, k, a->window, count, &low, &high);
        if (i >= n || low == high) {
          memset(row, 0, count * sizeof(float));
          continue;
        }
        for (long j = 0; j < low; j++) row[j] = -INFINITY;
        for (long j = high; j < count; j++) row[j] = -INFINITY;
        vec top = load(row), sums = {0};
        for (long j = LANES; j < count; j += LANES) top = larger(top, load(row + j));
        float before = largest[i], now = max_of(top) * factor;
        largest[i] = now = now > before ? now : before;
        for (long j = 0; j < count; j += LANES) {
          vec share = exp2_of(load(row + j) * factor - now);
          sums += share;
          store(row + j, share);
        }
        float fade = before == now ? 1.0f : exp2f(before - now);
        total[i] = total[i] * fade + sum_of(sums);
        if (fade != 1.0f)
          for (long j = 0; j < job->value_depth; j += LANES) store(sum + j, load(sum + j) * fade);
      }
      multiply(rows, job->value_depth, count, scores, KEYS, 1, values + k * job->value_depth, job->value_depth, mixed,
               job->value_depth, 1);
    }
    for (long i = 0; i < n; i++) {
      long token = job->first + q + i;
      float top = largest[i], sum = total[i], fade = 1.0f;
      if (a->sinks) {
        float sink = a->sinks[job->head] * LOG2E;
        top = sink > top ? sink : top;
        fade = exp2f(largest[i] - top);
        sum = sum * fade + exp2f(sink - top);
      }
      store_row((char *)a->output + (token * a->heads + job->head) * a->value_width * job->item,
                mixed + i * job->value_depth, a->value_width, a->is_bfloat, fade / sum);
      a->normaliser[job->head * a->tokens + token] = top + log2f(sum);
    }
  }
}

static void backward(const Attention *a, const Job *job, float *work) {
  long depth = job->depth, value_depth = job->value_depth, keys_in_all = job->tiles * KEYS;
  float *key_rows = work, *keys = key_rows + keys_in_all * depth, *values = keys + keys_in_all * depth;
  float *grad_keys = values + keys_in_all * value_depth, *grad_values = grad_keys + keys_in_all * depth;
  float *queries = grad_values + keys_in_all * value_depth, *grad_queries = queries + QUERIES * depth;
  float *ups = grad_queries + QUERIES * depth, *output = ups + QUERIES * value_depth;
  float *shares = output + value_depth, *grads = shares + QUERIES * KEYS, *delta = grads + QUERIES * KEYS;
  uint32_t *query_pairs = (uint32_t *)(delta + QUERIES), *up_pairs = query_pairs + QUERIES * job->pairs;
  float factor = job->pairs ? a->scale * LOG2E : 1.0f;
  load_rows(key_rows, job->pairs ? 0 : keys, job->key, a->key_token * job->item, job, a->width, depth, a->is_bfloat);
  if (job->pairs) {
    load_paired_tiles(keys, job->key, a->key_token * job->item, job, a->width, job->pairs);
    load_paired_tiles(values, job->value, a->value_token * job->item, job, a->value_width, job->value_pairs);
  } else {
    load_rows(0, values, job->value, a->value_token * job->item, job, a->value_width, value_depth, a->is_bfloat);
  }
  memset(grad_keys, 0, keys_in_all * (depth + value_depth) * sizeof(float));
  for (long q = 0; q < job->tokens; q += QUERIES) {
    long n = job->tokens - q < QUERIES ? job->tokens - q : QUERIES, rows = up(n, 8);
    memset(queries, 0, rows * depth * sizeof(float));
    memset(ups, 0, rows * value_depth * sizeof(float));
    memset(grad_queries, 0, rows * depth * sizeof(float));
    for (long i = 0; i < n; i++) {
      long token = job->first + q + i;
      float *of_row = ups + i * value_depth;
      const char *query = row_of(a->query, job->head, token, a->query_head, a->query_token, job->item);
      const char *upstream = row_of(a->upstream, job->head, token, a->upstream_head, a->upstream_token, job->item);
      load_row(queries + i * depth, query, a->width, depth, a->is_bfloat, a->scale * LOG2E);
      load_row(of_row, upstream, a->value_width, value_depth, a->is_bfloat, 1.0f);
      if (job->pairs) {
        load_pairs(query_pairs + i * job->pairs, query, a->width, job->pairs);
        load_pairs(up_pairs + i * job->value_pairs, upstream, a->value_width, job->value_pairs);
      }
      load_row(output, row_of(a->output, job->head, token, a->value_width, a->heads * a->value_width, job->item),
               a->value_width, value_depth, a->is_bfloat, 1.0f);
      vec sums = {0};
      for (long j = 0; j < value_depth; j += LANES) sums += load(of_row + j) * load(output + j);
      delta[i] = sum_of(sums);
    }
    for (long k = a->window && q >= a->window ? (q - a->window + 1) / KEYS * KEYS : 0; k < q + n; k += KEYS) {
      long count = up(q + n - k < KEYS ? q + n - k : KEYS, 2 * LANES);
      if (job->pairs) {
        multiply_pairs(rows, count, job->pairs, query_pairs, job->pairs, keys + k * job->pairs, KEYS, shares, KEYS);
        multiply_pairs(rows, count, job->value_pairs, up_pairs, job->value_pairs, values + k * job->value_pairs, KEYS,
                       grads, KEYS);
      } else {
        multiply(rows, count, depth, queries, depth, 1, keys + k * depth, KEYS, shares, KEYS, 0);
        multiply(rows, count, value_depth, ups, value_depth, 1, values + k * value_depth, KEYS, grads, KEYS, 0);
      }
      for (long i = 0; i < rows; i++) {
        float *share = shares + i * KEYS, *grad = grads + i * KEYS;
        long low, high;
        seen(q + i, k, a->window, count, &low, &high);
        if (i >= n || low == high) {
          memset(share, 0, count * sizeof(float));
          memset(grad, 0, count * sizeof(float));
          continue;
        }
        for (long j = 0; j < low; j++) share[j] = -INFINITY;
        for (long j = high; j < count; j++) share[j] = -INFINITY;
        float normaliser = a->normaliser[job->head * a->tokens + job->first + q + i];
        for (long j = 0; j < count; j += LANES) {
          vec one = exp2_of(load(share + j) * factor - normaliser);
          store(share + j, one);
          store(grad + j, one * (load(grad + j) - delta[i]));
        }
      }
      multiply(count, value_depth, rows, shares, 1, KEYS, ups, value_depth, grad_values + k * value_depth, value_depth, 1);
      multiply(count, depth, rows, grads, 1, KEYS, queries, depth, grad_keys + k * depth, depth, 1);
      multiply(rows, depth, count, grads, KEYS, 1, key_rows + k * depth, depth, grad_queries, depth, 1);
    }
    for (long i = 0; i < n; i++)
      store_row((char *)a->grad_query + ((job->first + q + i) * a->heads + job->head) * a->width * job->item,
                grad_queries + i * depth, a->width, a->is_bfloat, a->scale);
  }
  for (long i = 0; i < job->tokens; i++) {
    long row = (job->first + i) * a->heads + job->head;
    store_row((char *)(a->key_parts + row * a->width), grad_keys + i * depth, a->width, 0, 1.0f / LOG2E);
    store_row((char *)(a->value_parts + row * a->value_width), grad_values + i * value_depth, a->value_width, 0, 1.0f);
  }
}

/* The query heads of one key head follow each other: their parts are added up in that order. */
INLINE void add_parts(const Attention *a, void *sum, const float *parts, long token, long width) {
  long head_bytes = width * (a->is_bfloat ? 2 : 4);
  for (long head = 0; head < a->heads; head += a->groups) {
    const char *part = (const char *)(parts + (token * a->heads + head) * width);
    char *to = (char *)sum + (token * a->heads + head) / a->groups * head_bytes;
    for (long at = 0; at < width; at += LANES) {
      vec total = numbers_at(part, at, width, 0);
      for (long i = 1; i < a->groups; i++) total += numbers_at(part + i * width * 4, at, width, 0);
      put_at(to, at, width, a->is_bfloat, total);
    }
  }
}

/* Bytes of scratch that one thread needs for a longest document of `tokens`. */
int64_t attention_scratch(int64_t tokens, int64_t width, int64_t value_width, int64_t with_gradients) {
  long keys = up(tokens, KEYS), depth = up(width, LANES), value_depth = up(value_width, LANES);
  long floats = with_gradients ? keys * (3 * depth + 2 * value_depth) + 2 * QUERIES * depth +
                                     (QUERIES + 1) * value_depth + 2 * QUERIES * KEYS + QUERIES +
                                     QUERIES * (depth + value_depth) /* in pairs */
                               : keys * (depth + value_depth) + QUERIES * (depth + value_depth) + QUERIES * KEYS;
  return up(floats * sizeof(float), 64);
}

#include <omp.h>
static void for_each(const Attention *a, void (*work)(const Attention *, const Job *, float *)) {
  long jobs = a->n_documents * a->heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)a->threads)
  for (long number = 0; number < jobs; number++) {
    Job job = make_job(a, number);
    work(a, &job, (float *)(a->scratch + omp_get_thread_num() * a->scratch_bytes));
  }
}

void attention_forward(const Attention *a) { for_each(a, forward); }

void attention_backward(const Attention *a) {
  for_each(a, backward);
#pragma omp parallel for schedule(static) num_threads((int)a->threads)
  for (long token = 0; token < a->tokens; token++) {
    add_parts(a, a->grad_key, a->key_parts, token, a->width);
    add_parts(a, a->grad_value, a->value_parts, token, a->value_width);
  }
}
