// Rows of y and rows as they travel back, in units of a lane. Needs blocks.cuh and these constants:
//   HIDDEN, Value         elements of a row, their type in y and in the result
//   Wire                  type of an element on the way: Value, f32, u8 for e4m3
//   BLOCK_SCALES          a row is e4m3 with an f32 scale for each 128 elements, behind them at the next multiple of 4

constexpr u32 VALUE_BYTES = sizeof(Value);
constexpr u64 Y_ROW_BYTES = HIDDEN * VALUE_BYTES;
constexpr u32 WIRE_SCALES = (HIDDEN + 3) / 4 * 4; // offset of the scales
static_assert(Y_ROW_BYTES % 16 == 0, "Rows are read in vectors of 16 bytes.");
