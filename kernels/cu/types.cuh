// Types of kernels and of their arguments. No header of the toolkit is needed, so that NVRTC compiles every kernel by itself.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using f32 = float;
using f64 = double;
