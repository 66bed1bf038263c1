#pragma once

// Launchers of launchers.cu. Each copies `size` bytes, more than none, on `stream`, but for what
// stands above it; none looks at errors.

#include <cstdint>

struct CUstream_st;

namespace mutants {

void copy_bytes(const char* from, char* to, int64_t size, CUstream_st* stream);

// In vectors of 16 bytes where there is a whole one, whatever the alignment.
void copy_vectors(const char* from, char* to, int64_t size, CUstream_st* stream);

// Leaves out what no vector of 16 bytes holds.
void copy_whole_vectors(const char* from, char* to, int64_t size, CUstream_st* stream);

// With the blocks along the grid's second dimension, which has 65 535 at most.
void copy_by_grid_y(const char* from, char* to, int64_t size, CUstream_st* stream);

// By 64 blocks and no loop.
void copy_by_64_blocks(const char* from, char* to, int64_t size, CUstream_st* stream);

// By one block of a thread for each four bytes: at most 4096.
void copy_by_one_block(const char* from, char* to, int64_t size, CUstream_st* stream);

// By one block that keeps everything in shared memory: at most 48 KiB.
void copy_by_shared_memory(const char* from, char* to, int64_t size, CUstream_st* stream);

// By an index of 32 bits.
void copy_by_int(const char* from, char* to, int64_t size, CUstream_st* stream);

// Reads from[size] too.
void copy_and_read_behind(const char* from, char* to, int64_t size, CUstream_st* stream);

// Writes to[size] too.
void copy_and_write_behind(const char* from, char* to, int64_t size, CUstream_st* stream);

// Turned around in shared memory and back, with no barrier between.
void copy_without_barrier(const char* from, char* to, int64_t size, CUstream_st* stream);

// Floats, through a multiplication by one that makes subnormal numbers zero.
void copy_floats_flushed(const char* from, char* to, int64_t size, CUstream_st* stream);

// Floats, each NaN as the usual one.
void copy_floats_one_nan(const char* from, char* to, int64_t size, CUstream_st* stream);

// Fails, and copies nothing: no block has so many threads.
void launch_too_large(CUstream_st* stream);

}  // namespace mutants
