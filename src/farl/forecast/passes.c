/* The two passes over the weights, each reading and writing every byte once; see passes.py and native.py.
 *
 * Loops are plain and vectorised by the compiler. Up to four rows are read beside each other: the processor then fetches
 * all of them ahead, which it does not for one row after the other. What is cast at the end passes through strips that
 * stay in the first-level cache. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, INT8 };
enum { BLOCK = 128 /* entries that share a scale, as history.BLOCK */, STRIP = 4096, BESIDE = 4 };
#define INLINE static inline __attribute__((always_inline))

INLINE float wide(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

INLINE uint16_t narrow(float f) { /* to nearest, ties to even, as torch does */
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t rounded = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

/* to = from as float32 */
static const float *load(float *restrict to, const void *from, int kind, int64_t start, int64_t n) {
    if (kind == FLOAT32) return (const float *)from + start;
    const uint16_t *x = (const uint16_t *)from + start;
    for (int64_t i = 0; i < n; i++) to[i] = wide(x[i]);
    return to;
}

static void store_blocks(int8_t *restrict codes, float *restrict scales, const float *restrict from, int64_t start,
                         int64_t n) {
    for (int64_t b = 0; b < n; b += BLOCK) {
        int64_t m = n - b < BLOCK ? n - b : BLOCK;
        float largest = 0;
        for (int64_t i = 0; i < m; i++) {
            float size = fabsf(from[b + i]);
            largest = size > largest ? size : largest;
        }
        float scale = largest / 127;
        scales[(start + b) / BLOCK] = scale;
        int usable = scale > 0 && scale < INFINITY;
        for (int64_t i = 0; i < m; i++) codes[start + b + i] = usable ? (int8_t)rintf(from[b + i] / scale) : 0;
    }
}

/* row = leaf - last, last = leaf, over n entries; returns the squared norm of the difference. */
double farl_absorb(const void *leaf, int leaf_kind, float *restrict last, void *row, float *scales, int row_kind,
                   int64_t n) {
    double energy = 0;
    for (int64_t start = 0; start < n; start += STRIP) {
        int64_t m = n - start < STRIP ? n - start : STRIP;
        float scratch[STRIP], moved[STRIP], squared = 0;
        const float *here = load(scratch, leaf, leaf_kind, start, m);
        float *restrict kept = last + start;
        if (row_kind == BFLOAT16) {
            uint16_t *restrict to = (uint16_t *)row + start;
#pragma omp simd reduction(+ : squared)
            for (int64_t i = 0; i < m; i++) {
                float difference = here[i] - kept[i];
                kept[i] = here[i];
                to[i] = narrow(difference);
                squared += difference * difference;
            }
        } else {
            float *restrict to = row_kind == FLOAT32 ? (float *)row + start : moved;
#pragma omp simd reduction(+ : squared)
            for (int64_t i = 0; i < m; i++) {
                float difference = here[i] - kept[i];
                kept[i] = here[i];
                to[i] = difference;
                squared += difference * difference;
            }
            if (row_kind == INT8) store_blocks(row, scales, moved, start, m);
        }
        energy += squared;
    }
    return energy;
}

/* to = base + sum_k factors[k] * rows[k], for up to BESIDE rows. */
#define DEFINE_ADD(NAME, TYPE, WIDE)                                                                                   \
    INLINE void NAME##_few(float *to, const float *base, const void *const *rows, const float *factors,                \
                           const int count, int64_t start, int64_t n) {                                                \
        const TYPE *x0 = (const TYPE *)rows[0] + start, *x1 = count > 1 ? (const TYPE *)rows[1] + start : 0;           \
        const TYPE *x2 = count > 2 ? (const TYPE *)rows[2] + start : 0;                                                \
        const TYPE *x3 = count > 3 ? (const TYPE *)rows[3] + start : 0;                                                \
        float f0 = factors[0], f1 = count > 1 ? factors[1] : 0, f2 = count > 2 ? factors[2] : 0;                       \
        float f3 = count > 3 ? factors[3] : 0;                                                                         \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                          \
            float total = base[i] + f0 * WIDE(x0[i]);                                                                  \
            if (count > 1) total += f1 * WIDE(x1[i]);                                                                  \
            if (count > 2) total += f2 * WIDE(x2[i]);                                                                  \
            if (count > 3) total += f3 * WIDE(x3[i]);                                                                  \
            to[i] = total;                                                                                             \
        }                                                                                                              \
    }                                                                                                                  \
    static void NAME(float *to, const float *base, const void *const *rows, const float *factors, int count,           \
                     int64_t start, int64_t n) {                                                                       \
        switch (count) { /* a loop for each number of rows */                                                          \
        case 1: NAME##_few(to, base, rows, factors, 1, start, n); break;                                               \
        case 2: NAME##_few(to, base, rows, factors, 2, start, n); break;                                               \
        case 3: NAME##_few(to, base, rows, factors, 3, start, n); break;                                               \
        default: NAME##_few(to, base, rows, factors, 4, start, n);                                                     \
        }                                                                                                              \
    }
#define SAME(x) (x)
DEFINE_ADD(add_float32, float, SAME)
DEFINE_ADD(add_bfloat16, uint16_t, wide)

static void add_int8(float *to, const float *base, const int8_t *codes, const float *scales, float factor,
                     int64_t start, int64_t n) {
    for (int64_t b = 0; b < n; b += BLOCK) {
        int64_t end = n - b < BLOCK ? n : b + BLOCK;
        float scale = scales[(start + b) / BLOCK];
#pragma omp simd
        for (int64_t i = b; i < end; i++) to[i] = base[i] + factor * (scale * (float)codes[start + i]);
    }
}

/* out = base + sum_k factors[k] * rows[k], over n entries, summed in float32 in the order of the rows and cast last. */
void farl_combine(void *out, int out_kind, const void *base, int base_kind, const void *const *rows,
                  const float *const *scales, const float *factors, int num_rows, int row_kind, int64_t n) {
    for (int64_t start = 0; start < n; start += STRIP) {
        int64_t m = n - start < STRIP ? n - start : STRIP;
        float first[STRIP], sum[STRIP];
        const float *from = load(first, base, base_kind, start, m);
        float *to = out_kind == FLOAT32 ? (float *)out + start : sum;
        if (num_rows == 0) memmove(to, from, (size_t)m * sizeof *to);
        for (int k = 0; k < num_rows;) {
            int count = row_kind == INT8 ? 1 : num_rows - k < BESIDE ? num_rows - k : BESIDE;
            if (row_kind == INT8)
                add_int8(to, from, rows[k], scales[k], factors[k], start, m);
            else if (row_kind == FLOAT32)
                add_float32(to, from, rows + k, factors + k, count, start, m);
            else
                add_bfloat16(to, from, rows + k, factors + k, count, start, m);
            from = to;
            k += count;
        }
        if (out_kind == BFLOAT16) {
            uint16_t *x = (uint16_t *)out + start;
            for (int64_t i = 0; i < m; i++) x[i] = narrow(sum[i]);
        }
    }
}
