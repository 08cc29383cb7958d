#include "cpu.h"
#include "tile.h"

namespace tl::cpu {
namespace {

constexpr int64_t kPiecesPerThread = 8;  // enough that a thread that comes late still finds its share

// The last panel of an output whose width is no multiple of 16 goes through here, so that no row is overrun.
void ragged_panel(const TileArgs &whole, int64_t rows, int64_t width) {
  alignas(64) float corner[kTileRows * kPanel];
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const int64_t height = rows - row < kTileRows ? rows - row : kTileRows;
    TileArgs args = whole;
    args.a += row * whole.a_stride;
    args.c = corner;
    args.c_stride = kPanel;
    tile_rows<1>(height, args);
    for (int64_t r = 0; r < height; ++r)
      for (int64_t column = 0; column < width; ++column)
        whole.c[(row + r) * whole.c_stride + column] = corner[r * kPanel + column];
  }
}

void add_bias(const float *bias, float *out, int64_t rows, int64_t stride, int64_t width) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < width; ++column) out[row * stride + column] += bias[column];
}

struct Linear {
  const float *x, *packed, *bias;
  float *out;
  int64_t rows, inner, columns;

  void panels(int64_t first, int64_t last) const {
    for (int64_t panel = first; panel < last;) {
      const int64_t width = columns - panel * kPanel;
      TileArgs args{x,      inner, packed + panel * kPanel * inner, kPanel, kPanel * inner, out + panel * kPanel,
                    columns, inner, false};
      int64_t taken = 1;
      if (width < kPanel) {
        ragged_panel(args, rows, width);
      } else if (kTilePanels > 1 && panel + kTilePanels <= last && width >= kTilePanels * kPanel) {
        tile_block<kTilePanels>(rows, args);
        taken = kTilePanels;
      } else {
        tile_block<1>(rows, args);
      }
      if (bias != nullptr) {
        const int64_t written = width < taken * kPanel ? width : taken * kPanel;
        add_bias(bias + panel * kPanel, out + panel * kPanel, rows, columns, written);
      }
      panel += taken;
    }
  }
};

}  // namespace

void linear_pack(const float *weight, float *packed, int64_t rows, int64_t inner, int64_t first_column) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t column = first_column + row;
    float *lane = packed + column / kPanel * kPanel * inner + column % kPanel;
    for (int64_t k = 0; k < inner; ++k) lane[k * kPanel] = weight[row * inner + k];
  }
}

void linear(Pool &pool, const float *x, const float *packed, const float *bias, float *out, int64_t rows,
            int64_t inner, int64_t columns) {
  const Linear job{x, packed, bias, out, rows, inner, columns};
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  const int64_t groups = (panels + kTilePanels - 1) / kTilePanels;
  const int64_t share = groups / (pool.threads() * kPiecesPerThread);
  const int64_t step = (share > 1 ? share : 1) * kTilePanels;
  pool.run((panels + step - 1) / step, [=](int64_t piece) {
    const int64_t last = (piece + 1) * step < panels ? (piece + 1) * step : panels;
    job.panels(piece * step, last);
  });
}

}  // namespace tl::cpu
