// The warpgroup matrix instruction m64nNk16, bf16 operands from shared memory, fp32 accumulators in registers.
// One instruction is one 16-wide step of the contract's chain, so N (the tile width) never changes bits.
#pragma once
#include <stdint.h>

namespace h3::wgmma {

// Shared-memory matrix descriptor, 128-byte swizzle (PTX ISA, "Matrix descriptor format").
//   K-contiguous operand: rows of 64 k values (128 bytes), 8-row groups `stride` = 1024 bytes apart; `leading` unused.
//   M/N-contiguous operand: blocks of 64 m values, one k per 128-byte row; 8-k groups `stride` = 1024 bytes apart,
//   blocks of 64 m values `leading` bytes apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  return kSwizzle128 | (static_cast<uint64_t>(stride >> 4) << 32) | (static_cast<uint64_t>(leading >> 4) << 16) |
         ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties the accumulators to this point of the program: the compiler must not move their reads over a wait.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operand lists: F8(d, i) names eight accumulators, P8_<n> their eight places in the instruction's text.
#define H3_F8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define H3_F32(d, i) H3_F8(d, i), H3_F8(d, i + 8), H3_F8(d, i + 16), H3_F8(d, i + 24)
#define H3_P8_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define H3_P8_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define H3_P4_32 ",%32,%33,%34,%35"
#define H3_P32_0                                                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31"
#define H3_P16_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define H3_P8_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define H3_P8_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define H3_P16_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define H3_P4_80 ",%80,%81,%82,%83"
#define H3_P12_84 ",%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define H3_P16_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define H3_P16_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// Step<N, TA, TB>::run<kAdd>(d, a, b): d = A B + (kAdd ? d : 0) over 16 values of k; T = 1 reads that operand
// transposed.
template <int N, int TA, int TB>
struct Step;

#define H3_WGMMA(N, PLACES, A, B, TA_, TB_, ADD, ...)                                                        \
  template <int TA, int TB>                                                                                   \
  struct Step<N, TA, TB> {                                                                                    \
    template <int kAdd>                                                                                       \
    static __device__ __forceinline__ void run(float (&d)[N / 2], uint64_t a, uint64_t b) {                   \
      asm volatile("{\n.reg .pred add;\nsetp.ne.s32 add, " ADD ", 0;\n"                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PLACES "}, " A ", " B         \
                   ", add, 1, 1, " TA_ ", " TB_ ";\n}\n"                                                      \
                   : __VA_ARGS__                                                                              \
                   : "l"(a), "l"(b), "n"(TA), "n"(TB), "n"(kAdd));                                            \
    }                                                                                                         \
  };

H3_WGMMA(16, H3_P8_0, "%8", "%9", "%10", "%11", "%12", H3_F8(d, 0))
H3_WGMMA(32, H3_P8_0 H3_P8_8, "%16", "%17", "%18", "%19", "%20", H3_F8(d, 0), H3_F8(d, 8))
H3_WGMMA(72, H3_P32_0 H3_P4_32, "%36", "%37", "%38", "%39", "%40", H3_F32(d, 0), "+f"(d[32]), "+f"(d[33]),
         "+f"(d[34]), "+f"(d[35]))
H3_WGMMA(128, H3_P32_0 H3_P16_32 H3_P8_48 H3_P8_56, "%64", "%65", "%66", "%67", "%68", H3_F32(d, 0), H3_F32(d, 32))
H3_WGMMA(160, H3_P32_0 H3_P16_32 H3_P8_48 H3_P8_56 H3_P16_64, "%80", "%81", "%82", "%83", "%84",
         H3_F32(d, 0), H3_F32(d, 32), H3_F8(d, 64), H3_F8(d, 72))
H3_WGMMA(168, H3_P32_0 H3_P16_32 H3_P8_48 H3_P8_56 H3_P16_64 H3_P4_80, "%84", "%85", "%86", "%87", "%88",
         H3_F32(d, 0), H3_F32(d, 32), H3_F8(d, 64), H3_F8(d, 72), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]))
H3_WGMMA(192, H3_P32_0 H3_P16_32 H3_P8_48 H3_P8_56 H3_P16_64 H3_P4_80 H3_P12_84, "%96", "%97", "%98", "%99", "%100",
         H3_F32(d, 0), H3_F32(d, 32), H3_F32(d, 64))
H3_WGMMA(224, H3_P32_0 H3_P16_32 H3_P8_48 H3_P8_56 H3_P16_64 H3_P4_80 H3_P12_84 H3_P16_96, "%112", "%113", "%114",
         "%115", "%116", H3_F32(d, 0), H3_F32(d, 32), H3_F32(d, 64), H3_F8(d, 96), H3_F8(d, 104))
H3_WGMMA(256, H3_P32_0 H3_P16_32 H3_P8_48 H3_P8_56 H3_P16_64 H3_P4_80 H3_P12_84 H3_P16_96 H3_P16_112, "%128", "%129",
         "%130", "%131", "%132", H3_F32(d, 0), H3_F32(d, 32), H3_F32(d, 64), H3_F32(d, 96))

#undef H3_WGMMA

}  // namespace h3::wgmma
