// How far a long run is: a bar on standard error while that is a terminal, else nothing.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();  // takes the bar away
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Show(int64_t done, int64_t all);

 private:
  const std::string what_;
  const bool terminal_;
};

}  // namespace sluice
