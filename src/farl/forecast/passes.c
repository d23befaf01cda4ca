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

/* row = moved, in its storage */
static void store(void *row, float *scales, int kind, const float *restrict moved, int64_t start, int64_t n) {
    if (kind == INT8) {
        store_blocks(row, scales, moved, start, n);
    } else if (kind == FLOAT32) {
        memcpy((float *)row + start, moved, (size_t)n * sizeof *moved);
    } else {
        uint16_t *to = (uint16_t *)row + start;
        for (int64_t i = 0; i < n; i++) to[i] = narrow(moved[i]);
    }
}

static float squared_norm(const float *restrict moved, int64_t n) {
    float squared = 0;
#pragma omp simd reduction(+ : squared)
    for (int64_t i = 0; i < n; i++) squared += moved[i] * moved[i];
    return squared;
}

/* row = leaf - last, last = leaf, over n entries; returns the squared norm of the difference. */
double farl_absorb(const void *leaf, int leaf_kind, float *restrict last, void *row, float *scales, int row_kind,
                   int64_t n) {
    double energy = 0;
    for (int64_t start = 0; start < n; start += STRIP) {
        int64_t m = n - start < STRIP ? n - start : STRIP;
        float scratch[STRIP], moved[STRIP];
        const float *here = load(scratch, leaf, leaf_kind, start, m);
        float *restrict kept = last + start;
        for (int64_t i = 0; i < m; i++) {
            moved[i] = here[i] - kept[i];
            kept[i] = here[i];
        }
        energy += squared_norm(moved, m);
        store(row, scales, row_kind, moved, start, m);
    }
    return energy;
}

/* An optimizer as moments.Moments tells it; ADAM or SGD. */
enum { ADAM, SGD };
typedef struct {
    int kind, decoupled, nesterov;
    float beta1, beta2, eps, weight_decay, undampened; /* undampened: 1 - dampening */
} Optimizer;
typedef struct {
    float share, lr, scaled_lr, inverse_correction; /* scaled_lr: lr / (1 - beta1^s); inverse: 1 / (1 - beta2^s) */
} Update;

/* row = the displacement of the last update, read off the state after it; returns its squared norm. */
double farl_tell(const void *leaf, int leaf_kind, const void *first, int first_kind, const void *second,
                 int second_kind, const Optimizer *o, const Update *u, void *row, float *scales, int row_kind,
                 int64_t n) {
    double energy = 0;
    float decay = o->decoupled ? u->lr * o->weight_decay : 0, kept = 1 - decay;
    for (int64_t start = 0; start < n; start += STRIP) {
        int64_t m = n - start < STRIP ? n - start : STRIP;
        float a[STRIP], b[STRIP], c[STRIP], moved[STRIP];
        const float *mean = load(a, first, first_kind, start, m);
        if (o->kind == ADAM) {
            const float *square = load(b, second, second_kind, start, m);
            for (int64_t i = 0; i < m; i++)
                moved[i] = -u->scaled_lr * (mean[i] / (sqrtf(square[i] * u->inverse_correction) + o->eps));
        } else {
            for (int64_t i = 0; i < m; i++) moved[i] = -u->lr * mean[i];
        }
        if (decay != 0 && o->kind == ADAM) {
            const float *here = load(c, leaf, leaf_kind, start, m);
            for (int64_t i = 0; i < m; i++) moved[i] = (moved[i] - decay * here[i]) / kept;
        }
        energy += squared_norm(moved, m);
        store(row, scales, row_kind, moved, start, m);
    }
    return energy;
}

/* out = base + damping * sum_i share_i * (update i of the optimizer's own recursion with one assumed gradient, drift times
 * the first moment), over n entries. first is NULL where the optimizer keeps none. */
void farl_run_ahead(void *out, int out_kind, const void *base, int base_kind, const void *first, int first_kind,
                    const void *second, int second_kind, const Optimizer *o, const Update *updates, int num_updates,
                    float drift, float damping, int64_t n) {
    float coupled = o->decoupled ? 0 : o->weight_decay;
    for (int64_t start = 0; start < n; start += STRIP) {
        int64_t m = n - start < STRIP ? n - start : STRIP;
        float a[STRIP], mean[STRIP], square[STRIP], assumed[STRIP], here[STRIP], total[STRIP];
        const float *from = load(a, base, base_kind, start, m);
        memcpy(here, from, (size_t)m * sizeof *here);
        memset(total, 0, (size_t)m * sizeof *total);
        memset(mean, 0, (size_t)m * sizeof *mean);
        if (first) memmove(mean, load(mean, first, first_kind, start, m), (size_t)m * sizeof *mean);
        if (o->kind == ADAM) memmove(square, load(square, second, second_kind, start, m), (size_t)m * sizeof *square);
        for (int64_t i = 0; i < m; i++) assumed[i] = drift * mean[i];
        for (int k = 0; k < num_updates; k++) {
            const Update u = updates[k];
            float decay = o->decoupled ? u.lr * o->weight_decay : 0;
            if (o->kind == ADAM) {
                for (int64_t i = 0; i < m; i++) {
                    float gradient = assumed[i] + coupled * here[i];
                    mean[i] = mean[i] * o->beta1 + gradient * (1 - o->beta1);
                    square[i] = square[i] * o->beta2 + gradient * gradient * (1 - o->beta2);
                    float scaled = sqrtf(square[i] * u.inverse_correction) + o->eps;
                    float moved = -u.scaled_lr * (mean[i] / scaled) - decay * here[i];
                    here[i] += moved;
                    total[i] += u.share * moved;
                }
            } else {
                for (int64_t i = 0; i < m; i++) {
                    float gradient = assumed[i] + coupled * here[i];
                    float kept = o->beta1 != 0 ? mean[i] * o->beta1 + gradient * o->undampened : gradient;
                    float moved = -u.lr * (o->nesterov ? gradient + o->beta1 * kept : kept);
                    mean[i] = kept;
                    here[i] += moved;
                    total[i] += u.share * moved;
                }
            }
        }
        for (int64_t i = 0; i < m; i++) total[i] = from[i] + damping * total[i];
        store(out, 0, out_kind, total, start, m);
    }
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
        if (out_kind != FLOAT32) store(out, 0, out_kind, sum, start, m);
    }
}
