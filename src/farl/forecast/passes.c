/* The two passes over the weights, each reading and writing every byte once; see passes.py and native.py.
 * Worked in strips that stay in the first-level cache, in plain loops that compilers vectorise. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, INT8 };
enum { BLOCK = 128 /* entries that share a scale, as history.BLOCK */, STRIP = 2048, LANES = 32 };

static inline float wide(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint16_t narrow(float f) { /* to nearest, ties to even, as torch does */
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t rounded = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

static void load(float *restrict to, const void *from, int kind, int64_t start, int64_t n) {
    if (kind == FLOAT32) {
        memcpy(to, (const float *)from + start, (size_t)n * sizeof *to);
        return;
    }
    const uint16_t *x = (const uint16_t *)from + start;
    for (int64_t i = 0; i < n; i++) to[i] = wide(x[i]);
}

static void store(void *to, const float *restrict from, int kind, int64_t start, int64_t n) {
    if (kind == FLOAT32) {
        memcpy((float *)to + start, from, (size_t)n * sizeof *from);
        return;
    }
    uint16_t *x = (uint16_t *)to + start;
    for (int64_t i = 0; i < n; i++) x[i] = narrow(from[i]);
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
        float here[STRIP], moved[STRIP], squares[LANES] = {0};
        float *restrict kept = last + start;
        load(here, leaf, leaf_kind, start, m);
        for (int64_t i = 0; i < m; i++) {
            moved[i] = here[i] - kept[i];
            kept[i] = here[i];
        }
        int64_t i = 0;
        for (; i + LANES <= m; i += LANES)
            for (int j = 0; j < LANES; j++) squares[j] += moved[i + j] * moved[i + j];
        for (; i < m; i++) squares[0] += moved[i] * moved[i];
        for (int j = 0; j < LANES; j++) energy += squares[j];
        if (row_kind == INT8)
            store_blocks(row, scales, moved, start, m);
        else
            store(row, moved, row_kind, start, m);
    }
    return energy;
}

/* out = base + sum_k factors[k] * rows[k], over n entries, summed in float32 in the order of the rows. */
void farl_combine(void *out, int out_kind, const void *base, int base_kind, const void *const *rows,
                  const float *const *scales, const float *factors, int num_rows, int row_kind, int64_t n) {
    for (int64_t start = 0; start < n; start += STRIP) {
        int64_t m = n - start < STRIP ? n - start : STRIP;
        float total[STRIP];
        load(total, base, base_kind, start, m);
        for (int k = 0; k < num_rows; k++) {
            float factor = factors[k];
            if (row_kind == FLOAT32) {
                const float *x = (const float *)rows[k] + start;
                for (int64_t i = 0; i < m; i++) total[i] += factor * x[i];
            } else if (row_kind == BFLOAT16) {
                const uint16_t *x = (const uint16_t *)rows[k] + start;
                for (int64_t i = 0; i < m; i++) total[i] += factor * wide(x[i]);
            } else {
                const int8_t *x = (const int8_t *)rows[k] + start;
                for (int64_t b = 0; b < m; b += BLOCK) {
                    int64_t end = m - b < BLOCK ? m : b + BLOCK;
                    float scale = scales[k][(start + b) / BLOCK];
                    for (int64_t i = b; i < end; i++) total[i] += factor * (scale * (float)x[i]);
                }
            }
        }
        store(out, total, out_kind, start, m);
    }
}
