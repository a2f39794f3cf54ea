/* SPDX-License-Identifier: Apache-2.0
 *
 * The ABI with nothing else: opens a plugin, probes it, and has a strategy reduce the gradients of a model that it knows nothing of:
 * logistic regression on Fashion-MNIST, gradients and update written here, over two logical devices with shares of uneven size.
 * A model trained beside it on whole batches must come out the same.
 *
 *   stratagem-c-gradients PLUGIN.so FOLDER [NUM_IMAGES]
 *   stratagem-c-gradients lib/stratagem/data_parallel.so /usr/share/datasets/fashion-mnist 10000
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <stratagem/plugin.h>
#include <string.h>
#include <zlib.h>

enum { num_pixels = 784, num_classes = 10, batch_size = 256, num_devices = 2, num_epochs = 3 };
enum { num_weights = num_classes * num_pixels };
static const double learning_rate = 0.1;

/* An error of the ABI is the receiver's: read, then released. */
static void require(stg_error* error, const char* what) {
  if (error == NULL) return;
  fprintf(stderr, "%s: %.*s\n", what, (int)error->message.size_bytes, error->message.data);
  error->release(error);
  exit(1);
}

static void fail(const char* what, const char* why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(1);
}

static void* allocate(size_t size_bytes) {
  void* memory = calloc(1, size_bytes);
  if (memory == NULL) fail("memory", "there is none left");
  return memory;
}

/* ---- the plugin ---- */

static const stg_strategy_api* open_strategy(const char* path) {
  const stg_plugin* plugin;
  stg_plugin_probe_fn probe;
  char reason[512];
  const stg_probe_request request = {STG_ABI_MAJOR, 0, STG_ABI_MINOR, 0, {"stratagem-c-gradients", 21}};
  stg_probe_reply reply;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* never closed: see plugin.h */
  if (library == NULL) fail(path, dlerror());
  *(void**)&probe = dlsym(library, STG_PLUGIN_PROBE_SYMBOL);
  if (probe == NULL) fail(path, "it is no plugin: it has no " STG_PLUGIN_PROBE_SYMBOL);
  memset(&reply, 0, sizeof reply);
  reply.text = reason;
  reply.text_capacity_bytes = sizeof reason;
  if (probe(&request, &reply) != STG_PROBE_ACCEPTED) fail(path, reason);
  plugin = reply.plugin;
  if (plugin->num_strategies == 0) fail(path, "it offers no strategy");
  if (!STG_HAS(stg_strategy_api, plugin->strategies[0]->api, reduce_gradients)) fail(path, "its strategy reduces no gradients");
  printf("%.*s %.*s, ABI %u.%u\n", (int)plugin->name.size_bytes, plugin->name.data, (int)plugin->version.size_bytes,
         plugin->version.data, reply.abi_major, reply.minor);
  return plugin->strategies[0]->api;
}

static stg_strategy* create(const stg_strategy_api* api) {
  static const char config[] = "{\"accelerator\": \"cpu\", \"devices\": 2}";
  stg_create_args args;
  stg_setup_args setup;
  stg_strategy* strategy;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.config_json.data = config;
  args.config_json.size_bytes = sizeof config - 1;
  require(api->create(&args, &strategy), "create");
  memset(&setup, 0, sizeof setup); /* no model: reduce_gradients is all that is asked for */
  setup.struct_size = sizeof setup;
  require(api->setup(strategy, NULL, &setup), "setup");
  return strategy;
}

/* ---- the data ---- */

typedef struct images {
  uint8_t* pixels; /* (count, num_pixels) */
  uint8_t* labels; /* (count) */
  int count;
} images;

static uint8_t* read_idx(const char* folder, const char* name, int header_bytes, size_t size_bytes) {
  char path[4096];
  uint8_t* data = allocate(size_bytes);
  gzFile file;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  file = gzopen(path, "rb");
  if (file == NULL) fail(path, "it can't be opened");
  if (gzseek(file, header_bytes, SEEK_SET) < 0 || gzread(file, data, (unsigned)size_bytes) != (int)size_bytes)
    fail(path, "it is shorter than it should be");
  gzclose(file);
  return data;
}

static images read_images(const char* folder, const char* prefix, int count) {
  char name[64];
  images all;
  all.count = count;
  snprintf(name, sizeof name, "%s-images-idx3-ubyte.gz", prefix);
  all.pixels = read_idx(folder, name, 16, (size_t)count * num_pixels);
  snprintf(name, sizeof name, "%s-labels-idx1-ubyte.gz", prefix);
  all.labels = read_idx(folder, name, 8, (size_t)count);
  return all;
}

/* ---- the model ---- */

typedef struct parameters {
  double weights[num_weights]; /* (num_classes, num_pixels) */
  double bias[num_classes];
} parameters;

/* The classes' probabilities for one image: softmax of W x + b, x in [0, 1]. */
static void predict(const parameters* model, const uint8_t* pixels, double* out) {
  double largest = -INFINITY, sum = 0;
  for (int c = 0; c < num_classes; ++c) {
    const double* row = model->weights + c * num_pixels;
    out[c] = model->bias[c];
    for (int k = 0; k < num_pixels; ++k) out[c] += row[k] * pixels[k] / 255.0;
    if (out[c] > largest) largest = out[c];
  }
  for (int c = 0; c < num_classes; ++c) sum += out[c] = exp(out[c] - largest);
  for (int c = 0; c < num_classes; ++c) out[c] /= sum;
}

/* The gradient of the mean cross-entropy over the images [begin, end): for W and b, (p - onehot) x^T and (p - onehot), averaged. */
static void compute_gradient(const parameters* model, const images* data, int begin, int end, parameters* gradient) {
  memset(gradient, 0, sizeof *gradient);
  for (int i = begin; i < end; ++i) {
    const uint8_t* pixels = data->pixels + (size_t)i * num_pixels;
    double p[num_classes];
    predict(model, pixels, p);
    for (int c = 0; c < num_classes; ++c) {
      const double slope = (p[c] - (data->labels[i] == c)) / (end - begin);
      for (int k = 0; k < num_pixels; ++k) gradient->weights[c * num_pixels + k] += slope * pixels[k] / 255.0;
      gradient->bias[c] += slope;
    }
  }
}

static void update(parameters* model, const parameters* gradient) {
  for (int k = 0; k < num_weights; ++k) model->weights[k] -= learning_rate * gradient->weights[k];
  for (int c = 0; c < num_classes; ++c) model->bias[c] -= learning_rate * gradient->bias[c];
}

static double accuracy(const parameters* model, const images* data) {
  int num_right = 0;
  for (int i = 0; i < data->count; ++i) {
    double p[num_classes];
    int best = 0;
    predict(model, data->pixels + (size_t)i * num_pixels, p);
    for (int c = 1; c < num_classes; ++c) best = p[c] > p[best] ? c : best;
    num_right += best == data->labels[i];
  }
  return (double)num_right / data->count;
}

/* ---- one device's gradients, as the strategy takes them ---- */

typedef struct device {
  parameters gradient;
  int64_t weights_shape[2], bias_shape[1];
  stg_tensor weights, bias; /* views of `gradient`: nothing to release, so no deleter */
  stg_tensor* tensors[2];
  stg_gradient_set set;
} device;

static void view(stg_tensor* tensor, double* data, int num_dims, int64_t* shape) {
  memset(tensor, 0, sizeof *tensor);
  tensor->dlpack_major = STG_DLPACK_MAJOR;
  tensor->dlpack_minor = STG_DLPACK_MINOR;
  tensor->view.data = data;
  tensor->view.device.kind = STG_DEVICE_CPU; /* a tensor on any logical CPU device says cpu 0 */
  tensor->view.num_dims = num_dims;
  tensor->view.dtype.code = STG_DTYPE_FLOAT;
  tensor->view.dtype.bits = 64;
  tensor->view.dtype.lanes = 1;
  tensor->view.shape = shape; /* null strides: row-major */
}

static void prepare(device* self, int index) {
  memset(self, 0, sizeof *self);
  self->weights_shape[0] = num_classes;
  self->weights_shape[1] = num_pixels;
  self->bias_shape[0] = num_classes;
  view(&self->weights, self->gradient.weights, 2, self->weights_shape);
  view(&self->bias, self->gradient.bias, 1, self->bias_shape);
  self->tensors[0] = &self->weights;
  self->tensors[1] = &self->bias;
  self->set.struct_size = sizeof self->set;
  self->set.device.kind = STG_DEVICE_CPU;
  self->set.device.index = index;
  self->set.gradients = self->tensors;
  self->set.num_gradients = 2;
}

int main(int argc, char** argv) {
  const int num_images = argc > 3 ? atoi(argv[3]) : 10000;
  if (argc < 3 || num_images < batch_size || num_images > 60000) {
    fprintf(stderr, "usage: %s PLUGIN.so FOLDER_OF_FASHION_MNIST [NUM_IMAGES, %d to 60000]\n", argv[0], batch_size);
    return 2;
  }
  const stg_strategy_api* api = open_strategy(argv[1]);
  stg_strategy* strategy = create(api);
  const images train = read_images(argv[2], "train", num_images), test = read_images(argv[2], "t10k", 10000);

  parameters *model = allocate(sizeof *model), *reference = allocate(sizeof *reference), *whole = allocate(sizeof *whole);
  device* devices = allocate(num_devices * sizeof *devices);
  stg_gradient_set* sets[num_devices];
  for (int d = 0; d < num_devices; ++d) {
    prepare(&devices[d], d);
    sets[d] = &devices[d].set;
  }
  stg_reduce_gradients_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.sets = (stg_gradient_set* const*)sets;
  args.num_sets = num_devices;
  args.op = STG_REDUCE_MEAN;

  double largest_difference = 0;
  for (int epoch = 0; epoch < num_epochs; ++epoch) {
    for (int begin = 0; begin < num_images; begin += batch_size) {
      const int end = begin + batch_size < num_images ? begin + batch_size : num_images;
      const int middle = begin + (end - begin) / 3; /* a third and the rest: the weights matter */
      const int bounds[num_devices + 1] = {begin, middle, end};
      for (int d = 0; d < num_devices; ++d) {
        compute_gradient(model, &train, bounds[d], bounds[d + 1], &devices[d].gradient);
        devices[d].set.weight = bounds[d + 1] - bounds[d];
      }
      require(api->reduce_gradients(strategy, NULL, &args), "reduce_gradients");
      update(model, &devices[num_devices - 1].gradient); /* every device has the same now */
      compute_gradient(reference, &train, begin, end, whole);
      update(reference, whole);
    }
  }
  for (int k = 0; k < num_weights; ++k) {
    const double difference = fabs(model->weights[k] - reference->weights[k]);
    if (difference > largest_difference) largest_difference = difference;
  }
  const double right = accuracy(model, &test);
  printf("test accuracy %.2f %%, largest difference from one device %.1e\n", 100 * right, largest_difference);
  api->destroy(strategy);
  free(train.pixels);
  free(train.labels);
  free(test.pixels);
  free(test.labels);
  free(devices);
  free(model);
  free(reference);
  free(whole);
  if (!(largest_difference < 1e-12)) fail("the weights", "two devices did not train as one");
  if (!(right > 0.7)) fail("the accuracy", "it should be above 70 %");
  return 0;
}
